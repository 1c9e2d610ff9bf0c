"""The uses of a plan's memory, down to what is left of the budget."""

from __future__ import annotations

from edgespec.planning.plan import Plan

UNUSED = "unused"


def memory_lines(plan: Plan) -> dict[str, int]:
    """Bytes of the parts of a plan's budget; they add up to it, unless a mapped file may be paged out."""
    layout = plan.memory.layout
    if layout is not None:
        needs, placement = layout.needs, layout.placement
        ring = placement.n_slots * layout.holding.slot_bytes
        layers = sum(layout.layer_bytes[index] for index in placement.resident)
        parts = {
            "target's layers that stay": layers,
            "target's weights outside its layers": layout.other_bytes,
            f"ring of {placement.n_slots} slots": ring,
            "experts": placement.n_bytes - layout.fixed_bytes - layers - ring,
            "packed file": layout.pack_bytes,
        }
    else:
        if plan.machine.cards is not None:
            needs = plan.on_cards.left(plan.needs)
        else:
            needs = plan.needs if plan.assignment is None else plan.assignment.left(plan.needs)
        parts = {"target's weights": needs.footprints[0].weights}
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
    parts[UNUSED] = max(plan.memory.budget - sum(parts.values()), 0)
    return {what: n_bytes for what, n_bytes in parts.items() if n_bytes}
