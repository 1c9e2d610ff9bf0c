"""The uses of a plan's memory, line by line, down to what is left of the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.planning.memory.stream_layout import StreamLayout
from edgespec.planning.plan import Plan

UNUSED = "unused"


@dataclass(frozen=True)
class MemoryLine:
    """A part of a budget, and what takes it."""

    what: str
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {"what": self.what, "bytes": self.n_bytes}


def memory_lines(plan: Plan) -> list[MemoryLine]:
    """The parts of a plan's budget; they add up to it, unless a mapped file may be paged out."""
    layout = plan.memory.layout
    needs = _needs_here(plan) if layout is None else layout.needs
    parts = _weights(needs) if layout is None else _streamed_weights(layout)
    parts |= {
        "target's KV cache": needs.footprints[0].cache,
        "target's buffers and logits": needs.footprints[0].buffers,
    }
    for drafter in needs.footprints[1:]:
        parts |= {
            "drafter's weights": drafter.weights - (0 if layout is None else drafter.tables),
            "drafter's KV cache": drafter.cache,
            "drafter's buffers and logits": drafter.buffers,
        }
    named = dict(needs.process_parts)
    parts |= named | {"rest of the process": needs.process - sum(named.values())}
    lines = [MemoryLine(what, n_bytes) for what, n_bytes in parts.items() if n_bytes]
    left = plan.memory.budget - sum(line.n_bytes for line in lines)
    return [*lines, MemoryLine(UNUSED, left)] if left > 0 else lines


def _needs_here(plan: Plan) -> MemoryNeeds:
    """The needs of this machine's memory."""
    if plan.machine.cards is not None:
        return plan.on_cards.left(plan.needs)
    return plan.needs if plan.assignment is None else plan.assignment.left(plan.needs)


def _weights(needs: MemoryNeeds) -> dict[str, int]:
    return {"target's weights": needs.footprints[0].weights}


def _streamed_weights(layout: StreamLayout) -> dict[str, int]:
    """The target's weights that are in memory, and what others pass through."""
    holding, placement = layout.holding, layout.placement
    ring = placement.n_slots * holding.slot_bytes
    layers = sum(layout.layer_bytes[index] for index in placement.resident)
    fixed = layout.fixed_bytes
    return {
        "target's layers that stay": layers,
        "target's weights outside its layers": layout.other_bytes,
        f"ring of {placement.n_slots} slots": ring,
        "experts": placement.n_bytes - fixed - layers - ring,
        "packed file": layout.pack_bytes,
    }
