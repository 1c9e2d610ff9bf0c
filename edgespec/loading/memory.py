"""How the memory of target and drafter is planned, before either is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from platformdirs import user_cache_path

from edgespec.drafters.folder_index import MAKING_BYTES
from edgespec.generation.result import MemoryUse
from edgespec.loading.card_memory import NO_CARDS, OnCards, plan_for_cards
from edgespec.loading.cards import Cards
from edgespec.loading.devices import describe
from edgespec.loading.spreading import Spread
from edgespec.loading.state import LoadState
from edgespec.loading.workers import plan_for_crew
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.runtime.model import Model
from edgespec.offload.planning.budget import MemoryPlan, bytes_needed, memory_room, plan_memory
from edgespec.offload.planning.needs import ContextOptions, Needs, measure_needs


@dataclass(frozen=True)
class MemoryDecision:
    """What everything needs, and where the target's weights live.

    Attributes:
        needs: as if everything were on the processor.
        spread: which layers are on devices or other machines; None if none are.
        on_cards: what is on this machine's devices.
    """

    needs: Needs
    plan: MemoryPlan
    spread: Spread | None = None
    on_cards: OnCards = NO_CARDS

    @property
    def kernels(self) -> str:
        """Which kernels run, as keys of what is remembered name them."""
        return "plain" if self.plan.kernels_differ else "packed"

    @property
    def places(self) -> str:
        """Which layers are on which device, for keys; empty if all are on the processor."""
        return f" layers={self.spread.key}" if self.spread is not None else ""

    def use(self, model: Model, cards: Cards | None = None) -> MemoryUse:
        """What the loaded target takes, for reports.

        Args:
            cards: that could hold layers.
        """
        footprints = self.needs.footprints
        use = MemoryUse(budget_bytes=self.plan.budget, resident_bytes=sum(f.weights for f in footprints))
        use.device_bytes = self.on_cards.drafter_bytes
        use.devices = () if cards is None else tuple(map(describe, cards.devices))
        if self.spread is not None:
            use.device_bytes += self.spread.lent_bytes
            use.layers = self.spread.where
        use.resident_bytes -= use.device_bytes
        if self.plan.stream is not None and model.weights.resident_bytes:
            layers = model.weights.resident_bytes
            drafter = sum(f.weights for f in footprints[1:]) - self.on_cards.drafter_bytes
            use.resident_bytes = self.plan.stream.other_bytes + layers + drafter
            use.streamed_bytes_per_pass = model.weights.streamed_bytes
        return use


def decide_memory(target: ModelFiles, drafter: ModelFiles | None, state: LoadState) -> MemoryDecision:
    """Measure what is needed, and plan where weights live; packs streamed layers where that is wanted.

    Raises:
        MemoryLimitError, BackendError, OutputError, StreamError, ModelFileError: as measure_needs and
            plan_memory.
    """
    needs = _needs(target, drafter, state)
    if drafter is not None and needs.footprints[1].weights > needs.footprints[0].weights:
        name = drafter.headers[0].path.name
        state.notes.append(f"The drafter {name} is larger than its target: it is unlikely to pay off.")
    state.needed_bytes = bytes_needed(needs.footprints, needs.process)
    if state.crew is not None:
        plan, spread = plan_for_crew(state.crew, needs, target, state)
        return MemoryDecision(needs, plan, spread)
    on_cards = NO_CARDS
    if state.cards is not None:
        on_cards = plan_for_cards(state.cards, needs, target, drafter, state)
        if on_cards.spread is not None:  # exact passes are shorter then
            needs = _needs(target, drafter, state, on_devices=on_cards.spread.lent_bytes)
    left = on_cards.left(needs)
    plan = plan_memory(
        state.options.for_memory,
        left.footprints,
        target,
        user_cache_path("edgespec") / "packs",
        state.on_progress,
        left.process,
        left.rows,
        on_cards.n_layers,
    )
    state.notes += plan.notes
    return MemoryDecision(needs, plan, on_cards.spread, on_cards)


def _needs(target: ModelFiles, drafter: ModelFiles | None, state: LoadState, *, on_devices: int = 0) -> Needs:
    options = state.options
    lent = on_devices + (0 if state.crew is None else sum(device.free for device in state.crew.devices))
    indexing = 0 if options.draft_from is None else MAKING_BYTES
    needs = measure_needs(
        target,
        drafter,
        ContextOptions(
            options.n_cells,
            options.n_nodes,
            state.n_sequences(),
            state.n_threads,
            on_devices > 0,
            options.exact,
            options.experts,
            options.kv,
            sum(adapter.header.file_bytes for adapter in state.adapters),
        ),
        budget=memory_room(options.memory) - indexing + lent,
        offload=options.offload,
    )
    return replace(needs, process=needs.process + indexing)
