"""How the memory of target and drafter is planned, before either is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from platformdirs import user_cache_path

from edgespec.drafters.folder_index import MAKING_BYTES
from edgespec.errors import MemoryLimitError
from edgespec.generation.result import MemoryUse
from edgespec.kernels.layouts import own_in_use
from edgespec.loading.devices.cards import Cards
from edgespec.loading.devices.crew_plan import spread_over
from edgespec.loading.devices.finding import describe
from edgespec.loading.devices.on_cards import NO_CARDS, OnCards, place_models
from edgespec.loading.devices.spreading import Spread, read_rate
from edgespec.loading.pass_costs import expected_prefill
from edgespec.loading.state import LoadState
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.runtime.model import Model
from edgespec.offload.planning.budget import MemoryPlan, bytes_needed, memory_room, plan_memory
from edgespec.offload.planning.needs import ContextOptions, Needs, measure_needs
from edgespec.workers.crew import Crew


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
    crew_bytes = 0 if state.crew is None else sum(device.free for device in state.crew.devices)
    needs = _needs(target, drafter, state, lent=crew_bytes)
    if drafter is not None and needs.footprints[1].weights > needs.footprints[0].weights:
        name = drafter.headers[0].path.name
        state.notes.append(f"The drafter {name} is larger than its target: it is unlikely to pay off.")
    state.needed_bytes = bytes_needed(needs.footprints, needs.process)
    on_cards, spread, left = NO_CARDS, None, needs
    if state.crew is not None:
        needs, spread = _spread_on_workers(state.crew, needs, target, drafter, state)
        left, room = spread.left(needs), memory_room(state.config.memory.limit)
        if _fits(left, room):
            return MemoryDecision(needs, MemoryPlan(room, memory_map=False), spread)
    elif state.cards is not None:
        on_cards = _place_on_cards(state.cards, needs, target, drafter, state)
        spread = on_cards.spread
        if spread is not None:  # exact passes are shorter then
            needs = _needs(target, drafter, state, lent=spread.lent_bytes, devices=True)
        left = on_cards.left(needs)
    plan = plan_memory(
        state.config,
        left.footprints,
        target,
        user_cache_path("edgespec") / "packs",
        state.on_progress,
        left.process,
        left.rows,
        0 if spread is None else spread.elsewhere,
    )
    state.notes += plan.notes
    return MemoryDecision(needs, plan, spread, on_cards)


def _place_on_cards(
    cards: Cards, needs: Needs, target: ModelFiles, drafter: ModelFiles | None, state: LoadState
) -> OnCards:
    """What goes to the devices; raises as place_models."""
    wish = replace(state.wish, most=state.most_on_devices, read_rate=read_rate(target))
    room = memory_room(state.config.memory.limit)
    on_cards = place_models(cards, needs, target, drafter, room, wish, state.card_request)
    state.notes += on_cards.notes
    state.warnings += on_cards.shortfall(wish)
    return on_cards


def _spread_on_workers(
    crew: Crew, needs: Needs, target: ModelFiles, drafter: ModelFiles | None, state: LoadState
) -> tuple[Needs, Spread]:
    """What is needed, and which layers workers hold; raises as spread_over.

    Where the memories do not suffice, passes get fewer rows first, and what is left over is streamed then.
    """
    room = memory_room(state.config.memory.limit)
    try:
        spread = spread_over(crew, needs, target, room)
        suffices = _fits(spread.left(needs), room)
    except MemoryLimitError:
        suffices = False
    if not suffices:
        needs = _needs(target, drafter, state, devices=True)
        disk_rate = None if state.config.memory.offload == "none" else read_rate(target)
        spread = spread_over(crew, needs, target, room, disk_rate)
    state.notes.append(f"Layers: {spread.where}.")
    return needs, spread


def _fits(needs: Needs, room: int) -> bool:
    return bytes_needed(needs.footprints, needs.process) <= room


def _needs(
    target: ModelFiles,
    drafter: ModelFiles | None,
    state: LoadState,
    *,
    lent: int = 0,
    devices: bool = False,
) -> Needs:
    """What is needed, as if everything were on this machine's processor.

    Args:
        lent: bytes for weights on devices or other machines.
        devices: whether layers are there, and the others may be streamed.
    """
    config = state.config
    indexing = 0 if config.speculation.draft_from is None else MAKING_BYTES
    needs = measure_needs(
        target,
        drafter,
        ContextOptions(
            state.n_cells,
            state.n_nodes,
            state.n_sequences(),
            state.n_threads,
            devices,
            config.speculation.exact,
            config.memory.experts,
            config.model.kv,
            sum(adapter.header.file_bytes for adapter in state.adapters),
            own_in_use(),
            state.drafter_sequences(),
        ),
        budget=memory_room(config.memory.limit) - indexing + lent,
        offload=config.memory.offload,
        prefill=expected_prefill(target, config.model.context, state.n_threads),
    )
    return replace(needs, process=needs.process + indexing)
