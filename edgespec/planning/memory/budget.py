"""The memory budget: what is resident, what is streamed, and whether it suffices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from edgespec.base.option import named
from edgespec.base.units import readable, rounded_up
from edgespec.config import Config
from edgespec.costs.planned_weights import HitRates, PlannedWeights
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.packing.choice import packing_in_memory
from edgespec.offload.packing.division import named_folders
from edgespec.offload.packing.index import packs_folder
from edgespec.planning.memory.needs import MemoryNeeds, tied_bytes
from edgespec.planning.memory.stream_layout import StreamLayout, streamable, wants_pack


@dataclass(frozen=True)
class MemoryPlan:
    """The use of a budget."""

    budget: int  # bytes of this machine's memory that may be used in total
    # where the target's weights are: in bytes, or by layers if these are streamed
    weights: PlannedWeights | StreamLayout
    memory_map: bool = False  # whether the target's file is mapped
    # whether it is mapped although it does not fit, so that the system pages it in and out
    paged: bool = False
    pack: str = "never"  # whether they are to be packed: "auto", "always" or "never"
    notes: tuple[str, ...] = ()  # sentences that people may want to read
    warnings: tuple[str, ...] = ()  # where the plan departs from the options

    @property
    def layout(self) -> StreamLayout | None:
        """The places of the target's layers if these are streamed."""
        return self.weights if isinstance(self.weights, StreamLayout) else None

    @property
    def holding(self) -> PlannedWeights:
        """The places of the target's weights, in bytes."""
        return self.weights.holding if isinstance(self.weights, StreamLayout) else self.weights

    @property
    def in_memory(self) -> bool:
        """True if all weights stay in memory."""
        return self.layout is None and not self.paged

    @property
    def kernels_differ(self) -> bool:
        """True if different kernels run than for the same model in memory."""
        return self.paged or (self.layout is not None and self.layout.kernels_differ)


def plan_memory(
    needs: MemoryNeeds,
    files: ModelFiles,
    budget: int,
    config: Config,
    *,
    elsewhere: Collection[str] = frozenset(),
    hits: HitRates | None = None,
    no_streaming: str = "",
) -> MemoryPlan:
    """Decide where the target's weights are held, without reading or writing any.

    Args:
        needs: of this machine's memory, without layers that are on devices.
        files: the whole target.
        budget: bytes that may be used: those of the options, if there are as many.
        elsewhere: names of weights that devices hold.
        hits: how often experts are in memory; None assumes it.
        no_streaming: why weights cannot be streamed on this machine; empty if they can.

    Raises:
        MemoryLimitError: not even the caches fit, or the weights must fit and do not.
        BackendError: weights must be streamed, and cannot be on this machine.
    """
    options, rest = config.memory, files.without(elsewhere)
    warnings: tuple[str, ...] = ()
    if options.limit is not None and options.limit > budget:
        warnings = (
            f"{named('memory')} is lowered from {readable(options.limit)} to {readable(budget)}: "
            "no more is available now.",
        )
    whole, weights = needs.total, needs.footprints[0].weights
    least = whole - sum(size.weights for size in needs.footprints)
    had = f"the {'budget is' if options.limit else 'machine has'} {readable(budget)}"
    if budget < least:
        raise MemoryLimitError(
            f"A context of {config.model.context} tokens needs {readable(rounded_up(least))} of memory "
            f"besides the weights, and {had}.",
            f"Lower {named('context')}, or raise {named('memory')}.",
            least=least,
        )
    all_elsewhere = bool(elsewhere) and not rest.layers()
    if budget >= whole and (options.offload != "stream" or all_elsewhere):
        # Weights in memory do not depend on the file any more. But a tied embedding is then in memory twice;
        # if that is too much, the file is mapped.
        fits = options.offload == "none" or budget >= whole + _second_copy(files)
        holding = PlannedWeights(budget, whole, rest.tensor_bytes)
        return MemoryPlan(
            budget, holding, memory_map=options.offload == "mmap" or not fits, warnings=warnings
        )
    if options.offload == "stream" and all_elsewhere:
        raise MemoryLimitError(
            f"What is not on devices needs {readable(whole)} of memory, and {had}.",
            f"Raise {named('memory')}.",
            least=whole,
        )
    if options.offload == "none":
        raise MemoryLimitError(
            f"The model needs {readable(whole)} of memory, and {had}.",
            f"Leave out {named('offload', 'none')}, raise {named('memory')}, or use a smaller quantization.",
            least=whole,
        )
    notes: tuple[str, ...] = ()
    if options.offload != "mmap":
        try:
            if no_streaming:
                raise UnsupportedBuild(no_streaming)
            plan = _streamed(needs, files, elsewhere, budget, config, hits or HitRates())
            return replace(plan, warnings=warnings)
        except UnsupportedBuild as error:
            if options.offload == "stream":
                raise BackendError(
                    f"Weights cannot be streamed here: {error}.", f"Use {named('offload', 'mmap')}."
                ) from error
            notes = (f"Weights cannot be streamed here: {error}.",)
    notes += (
        f"The model needs {readable(whole)} of memory and {had}: the system pages its weights in from disk, "
        "which is slow.",
    )
    resident = min(max(budget - (whole - weights), 0), rest.tensor_bytes)
    holding = PlannedWeights(budget, whole, resident, rest.tensor_bytes - resident)
    return MemoryPlan(budget, holding, memory_map=True, paged=True, notes=notes, warnings=warnings)


def least_budget(needs: MemoryNeeds, files: ModelFiles, config: Config) -> int:
    """The smallest budget that yields a plan, with all weights streamed if they can be."""
    budget = 0
    while budget < needs.total:
        try:
            plan_memory(needs, files, budget, config)
        except MemoryLimitError as error:
            if error.least is None or error.least <= budget:
                raise
            budget = error.least
        else:
            return budget
    return needs.total  # where streaming takes more, as for a second copy of tied embeddings


def _streamed(
    needs: MemoryNeeds,
    files: ModelFiles,
    elsewhere: Collection[str],
    budget: int,
    config: Config,
    hits: HitRates,
) -> MemoryPlan:
    """The plan with streamed layers; raises as StreamLayout."""
    notes: list[str] = []
    weights = streamable(files, config.memory.experts)
    spread = named_folders(config.memory.pack_dir)
    pack, pack_bytes = packing_in_memory(files, weights, config.memory.pack, packs_folder(), notes, spread)
    packed = wants_pack(files, pack)
    try:
        layout = StreamLayout.of(
            files, needs, budget, config, hits, elsewhere=elsewhere, packed=packed, pack_bytes=pack_bytes
        )
    except MemoryLimitError as error:
        if not pack_bytes:
            raise
        in_memory = spread.in_memory or (packs_folder(),)
        remedy = "set XDG_CACHE_HOME to a folder on a disk"
        if spread.folders:
            remedy = f"name a folder on a disk for {named('pack_dir')}"
        raise MemoryLimitError(
            error.what,
            f"The packed layer file takes {readable(pack_bytes)} of that, as '{in_memory[0]}' lies in "
            f"memory: {remedy}, or use {named('pack', 'never')}.",
            least=error.least,
        ) from error
    return MemoryPlan(budget, layout, pack=pack, notes=tuple(notes))


def _second_copy(files: ModelFiles) -> int:
    """Bytes of a tied embedding's second copy; 0 if ggml cannot be asked about layouts."""
    try:
        return tied_bytes(files)
    except UnsupportedBuild:
        return 0
