"""The plan of a load: where every layer will be, what that takes, and why. `load` carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.layer_assignment import RemotePart, curve_over_machines
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import TargetPasses
from edgespec.costs.sending import HostProducts
from edgespec.generation.result import MemoryUse
from edgespec.llama.row_rule import FREE, FREE_SPARING, MAX_PADDED_ROWS, SPARING, THOROUGH, Search
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.planning.devices.assignment import (
    LayerAssignment,
    LayerDevices,
    remote_parts,
)
from edgespec.planning.devices.card_placement import NO_CARDS, CardPlacement, drafter_parts
from edgespec.planning.devices.cards import Cards
from edgespec.planning.devices.finding import describe
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.memory.budget import MemoryPlan
from edgespec.planning.memory.needs import ContextShape, MemoryNeeds
from edgespec.planning.memory.stream_layout import StreamLayout

_EXPERT_NODES = 8  # every node needs experts of its own, so that larger trees lose


@dataclass(frozen=True)
class SequencePlan:
    """The number of sequences answered at once."""

    sequences: int | None = None  # how many, where a call does not say; None leaves it to the passes' costs
    more_cells: int = 0  # cells of the cache besides those for a single sequence
    note: str = field(default="", compare=False)  # what that takes, in a sentence


@dataclass(frozen=True)
class Plan:
    """The places of the weights of a target and its drafter, and the memory that these take."""

    config: Config  # the options that it is for
    # the models; no drafter if it has no model
    target: ModelFiles
    drafter: ModelFiles | None
    context: ContextShape  # the sizes of their contexts: cells, rows with logits, sequences, threads
    needs: MemoryNeeds  # as if everything were on the processor, with the rows of a pass
    memory: MemoryPlan  # what of this machine's memory holds the target, and what is streamed
    machine: MachineSnapshot  # that this is a plan for
    assignment: LayerAssignment | None = None  # which layers are on cards or workers; None if none are
    on_cards: CardPlacement = NO_CARDS  # what is on cards
    # with weights that no card holds; None if these are computed as without one
    products: HostProducts | None = None
    sequences: SequencePlan = SequencePlan()  # how many are answered at once
    # the reasons, in sentences
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def holding(self) -> PlannedWeights:
        """The places of the target's weights, in bytes."""
        return self.memory.holding

    @property
    def drafter_tables(self) -> int:
        """Bytes of the drafter's tables that are left in its file."""
        on_card = bool(self.on_cards.drafter_name)
        return 0 if self.memory.layout is None or on_card else self.needs.drafter_tables

    @property
    def drafts_for_itself(self) -> bool:
        """True if the target's own layers for multi-token prediction draft."""
        return isinstance(self.drafter, MTPLayers)

    @property
    def streams(self) -> bool:
        """True if passes read weights from disk."""
        return self.holding.streamed_bytes > 0

    @property
    def exact(self) -> bool:
        """Exactness of decoding: as asked for, or else where the weights are streamed.

        A streamed pass takes the same time with the rows that exactness adds. But where only the experts that
        rows need are read, a pass over few rows takes about as long as its arithmetic. And a card that is
        sent weights for many rows rounds differently than the processor, which computes few.
        """
        asked, layout = self.config.speculation.exact, self.memory.layout
        costs_nothing = layout is not None and not layout.weights.experts and not self.sends
        return costs_nothing if asked is None else asked

    @property
    def sends(self) -> bool:
        """True if passes of many rows send weights to a card."""
        return self.products is not None and self.products.sends

    @property
    def alone(self) -> bool:
        """True if this machine's processor computes all layers: other devices cannot be watched."""
        return self.assignment is None and self.machine.workers is None

    @property
    def times_threads(self) -> bool:
        """True if passes over random text are to find the fastest number of threads, where that is asked.

        They would fill the memory for experts with those that no real text needs. And what they take on
        devices and other machines says nothing of the processor.
        """
        speculation = self.config.speculation
        sizes_trees = speculation.drafts and speculation.tree_budget is None
        return sizes_trees and self.holding.experts is None and self.assignment is None

    @property
    def kernels(self) -> str:
        """The kernel layout, as used in profile keys."""
        return "plain" if self.memory.kernels_differ or not self.rearranges else "packed"

    @property
    def rearranges(self) -> bool:
        """True if weights in memory are rearranged for the processor, where it has kernels for that."""
        return not self.memory.paged and (self.products is None or self.products.rearranged)

    @property
    def places(self) -> str:
        """The places of layers, for keys; empty if all are on the processor."""
        if self.assignment is None:
            return ""
        products, sent = self.products, ""
        if products is not None and (products.sends or not self.rearranges):
            sent = f" {'read again' if products.rereads else 'sent'} from {products.sent_from}"
        return f" layers={self.assignment.key}{sent}"

    @property
    def rereads(self) -> bool:
        """True if weights in memory are read from the model's file again, to be sent for prompts."""
        return self.products is not None and self.products.rereads

    def with_layout(self, layout: StreamLayout) -> Plan:
        """The plan with other places of streamed weights."""
        return replace(self, memory=replace(self.memory, weights=layout))

    def use(self, model: Model) -> MemoryUse:
        """Memory of the loaded target, for reports."""
        footprints, layout = self.needs.footprints, self.memory.layout
        use = MemoryUse(
            budget_bytes=self.memory.budget,
            resident_bytes=sum(f.weights for f in footprints),
            target_bytes=footprints[0].weights,
        )
        use.device_bytes = self.on_cards.drafter_bytes
        cards = self.machine.cards
        use.devices = () if cards is None else tuple(map(describe, cards.devices))
        if self.assignment is not None:
            use.device_bytes += self.assignment.lent_bytes
            use.layers = self.assignment.where
        use.resident_bytes -= use.device_bytes
        if layout is not None and model.weights.resident_bytes:
            drafter = sum(f.weights for f in footprints[1:]) - self.on_cards.drafter_bytes
            drafter -= self.drafter_tables
            use.resident_bytes = layout.other_bytes + model.weights.resident_bytes + drafter
            use.streamed_bytes_per_pass = model.weights.streamed_bytes
        return use

    @property
    def parts(self) -> list[RemotePart]:
        """Time per pass on each device that holds layers."""
        return device_parts(self.assignment, self._devices, self.target, self.products)

    @property
    def _devices(self) -> LayerDevices | Cards | None:
        """The workers or cards that may hold layers; None if there are none."""
        return self.machine.workers or self.on_cards.cards

    def over(self, passes: TargetPasses) -> TargetPasses:
        """The target's passes, from those of the whole model on the processor."""
        return replace(passes, compute=curve_over_machines(passes.compute, self.parts))

    def draft_steps(self, here: Curve) -> Curve:
        """Seconds of draft steps by rows, from those on the processor."""
        parts = () if self.drafter is None else drafter_parts(self.on_cards, self.drafter)
        return curve_over_machines(here, parts)


def device_parts(
    assignment: LayerAssignment | None,
    devices: LayerDevices | Cards | None,
    target: ModelFiles,
    products: HostProducts | None,
) -> list[RemotePart]:
    """Time per pass on each device that holds layers, and of products that are not computed as usual."""
    if assignment is None or devices is None:
        return []
    parts = remote_parts(assignment, devices, target)
    if products is not None:
        parts.append(products.part(1 - sum(part.share for part in parts)))
    return parts


def rule_searches(plan: Plan) -> tuple[Search, ...]:
    """The searches for a row rule that are made for exact decoding, in order; empty if it was declined.

    Own kernels compute alike with any number of rows. In memory, that makes decoding exact for nothing, so
    they are tried even where exactness was not asked for.
    """
    if plan.exact:
        slow = plan.memory.layout is not None or plan.machine.workers is not None
        searches = (FREE_SPARING, SPARING) if slow else (FREE, THOROUGH)
        return searches if plan.alone else searches[1:]
    declined = plan.config.speculation.exact is not None
    free = plan.memory.in_memory and plan.alone and plan.machine.own_kernels and not declined
    return (FREE,) if free else ()


def pads_rows(plan: Plan) -> bool:
    """True if streamed passes are to be padded to the rows of exact decoding."""
    return plan.streams and plan.exact and not plan.machine.own_kernels


def max_nodes(plan: Plan) -> int:
    """Nodes that a tree may have."""
    fixed = plan.config.speculation.tree_budget is not None
    nodes = _EXPERT_NODES if plan.holding.experts is not None and not fixed else plan.context.n_outputs
    return min(nodes, MAX_PADDED_ROWS) if pads_rows(plan) else nodes
