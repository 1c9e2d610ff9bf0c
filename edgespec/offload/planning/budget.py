"""One memory budget for everything: what is resident, what is streamed, and whether it suffices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from edgespec.config import Config
from edgespec.costs.planned_memory import HitRates, PlannedExperts, PlannedMemory
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.machine.probe import available_memory
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.planning.stream_plan import (
    StreamPlan,
    largest_beside,
    place_weights,
    plan_stream,
    pool_sizes,
    stored_sizes,
    tied_bytes,
)
from edgespec.progress import Progress
from edgespec.units import readable

# The interpreter and its libraries. In another program, what exceeds this is that program's own.
PROCESS_BYTES = 96 << 20

LEARNED_BYTES = 22 << 20  # for what is learned of a pair with a model as drafter, including while it is saved
_LATER_BYTES = 64 << 20  # vocabularies, noise and so on, if they were not measured
_MARGIN = 0.05  # of available memory, left for other programs


@dataclass
class MemoryPlan:
    """How the budget is spent.

    Attributes:
        budget: bytes that may be used in total.
        memory_map: whether the target's file is mapped.
        paged: whether it is mapped although it does not fit, so that the system pages it in and out.
        stream: how the target's layers are streamed; None if they are not.
        notes: sentences that people may want to read.
        warnings: where the plan departs from the options.
    """

    budget: int
    memory_map: bool
    paged: bool = False
    stream: StreamPlan | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    replan: Callable[[str], StreamPlan] | None = None

    @property
    def kernels_differ(self) -> bool:
        """Whether different kernels run than for the same model in memory."""
        return self.paged or (self.stream is not None and self.stream.kernels_differ)

    def stream_again(self, experts: str = "auto") -> StreamPlan:
        """Plan the stream again: its packed file was damaged and removed, or its experts cannot be streamed.

        Args:
            experts: "never" for whole layers from now on.
        """
        assert self.replan is not None
        self.stream = self.replan(experts)
        return self.stream


def plan_memory(
    config: Config,
    footprints: list[Footprint],
    files: ModelFiles,
    pack_folder: Path,
    on_progress: Progress,
    process: int | None = None,
    n_rows: int = 1,
    on_devices: int = 0,
) -> MemoryPlan:
    """Decide where the target's weights are held; packs them first if they are to be streamed.

    Args:
        footprints: the target's footprint, and the drafter's if it is a model.
        process: bytes of the process itself; None estimates them.
        n_rows: most rows of the target's passes.
        on_devices: the last layers, which are on devices, so that the target's footprint is without them.

    Raises:
        MemoryLimitError: not even the caches fit, or the weights must fit and do not.
        BackendError: weights must be streamed, and cannot be on this machine.
        OutputError, StreamError: as plan_stream.
    """
    options = config.memory
    budget = memory_room(options.limit)
    notes: list[str] = []
    warnings = []
    if options.limit is not None and options.limit > budget:
        warnings.append(
            f"--memory is lowered from {readable(options.limit)} to {readable(budget)}: "
            "no more is available now."
        )
    whole = bytes_needed(footprints, process)
    least = whole - sum(p.weights for p in footprints)
    had = f"there are {readable(budget)}" + (" in the budget" if options.limit else "")
    if budget < least:
        raise MemoryLimitError(
            f"A context of {config.model.context} tokens needs {readable(least)} of memory besides the "
            f"weights, and {had}.",
            "Ask for a smaller --context, or for more --memory.",
            least=least,
        )
    if budget >= whole and options.offload != "stream":
        # Weights in memory do not depend on the file any more. But a tied embedding is then in memory twice;
        # if that is too much, the file is mapped.
        fits = options.offload == "none" or budget >= whole + _second_copy(files)
        return MemoryPlan(budget, memory_map=options.offload == "mmap" or not fits, warnings=warnings)
    if options.offload == "none":
        raise MemoryLimitError(
            f"The model needs {readable(whole)} of memory, and {had}.",
            "Leave out --offload none, ask for more --memory, or take a smaller quantization.",
            least=whole,
        )

    def plan(experts: str = "auto") -> StreamPlan:
        return plan_stream(
            files,
            budget=budget,
            fixed=whole - footprints[0].weights,
            process=process_bytes(footprints) if process is None else process,
            pack=options.pack,
            pack_folder=pack_folder,
            on_devices=on_devices,
            n_slots=options.slots,
            experts="never" if "never" in (experts, options.experts) else "auto",
            n_rows=n_rows,
            on_progress=on_progress,
        )

    if options.offload != "mmap":
        try:
            return MemoryPlan(
                budget, memory_map=False, stream=plan(), notes=notes, warnings=warnings, replan=plan
            )
        except UnsupportedBuild as error:
            if options.offload == "stream":
                raise BackendError(
                    f"Weights cannot be streamed here: {error}.", "Use --offload mmap."
                ) from error
            notes.append(f"Weights cannot be streamed here: {error}.")
    notes.append(
        f"The model needs {readable(whole)} of memory and {had}: its weights are paged in from disk "
        "by the system, which is slow."
    )
    return MemoryPlan(budget, memory_map=True, paged=True, notes=notes, warnings=warnings)


def _second_copy(files: ModelFiles) -> int:
    """Bytes of a tied embedding's second copy; 0 if ggml cannot be asked about layouts."""
    try:
        return tied_bytes(files)
    except UnsupportedBuild:
        return 0


def predict_memory(
    footprints: list[Footprint],
    files: ModelFiles,
    budget: int,
    *,
    streams: bool = False,
    hits: HitRates | None = None,
    process: int | None = None,
    n_rows: int = USUAL_NODES,
) -> PlannedMemory:
    """Where weights would be held under a budget, found without reading or writing any.

    Args:
        footprints: the target's footprint, and the drafter's if it is a model.
        streams: stream even if all weights fit.
        hits: how often experts are in memory; None assumes it.
        process: bytes of the process itself; None estimates them.
        n_rows: most rows of the target's passes.

    Raises:
        MemoryLimitError: the budget is too small; says how much is needed.
    """
    whole = bytes_needed(footprints, process)
    weights = layer_weights(files)
    layers, expert_bytes = stored_sizes(files, weights)
    if (budget >= whole and not streams) or not (layers or expert_bytes):
        return PlannedMemory(budget, whole, files.tensor_bytes)
    beside = files.tensor_bytes - weights.n_bytes
    other = beside + tied_bytes(files)
    placement = place_weights(
        layers,
        pool_sizes(weights, expert_bytes, n_rows),
        budget=budget,
        fixed=whole - footprints[0].weights + other,
        loading=(PROCESS_BYTES if process is None else process) + other + largest_beside(files),
    )
    streamed = sum(layers[index] for index in placement.streamed)
    resident = beside + sum(layers[index] for index in placement.resident)
    experts = None
    if placement.expert_slots:
        n_needed = weights.n_used * len(weights.experts)
        slots, hits = placement.expert_slots, hits or HitRates()
        rate = hits.at(slots / weights.n_experts)
        experts = PlannedExperts(
            expert_bytes, slots, weights.n_experts, n_needed, rate, measured=hits.measured
        )
        streamed += experts.missed_bytes(1)
        resident += placement.expert_slots * expert_bytes
    slot = max(layers.values(), default=0)
    return PlannedMemory(budget, whole, resident, streamed, slot, placement.n_slots, experts)


def process_bytes(footprints: list[Footprint]) -> int:
    """An estimate of the memory of the process itself, including libraries."""
    return PROCESS_BYTES + _LATER_BYTES + (LEARNED_BYTES if len(footprints) > 1 else 0)


def bytes_needed(footprints: list[Footprint], process: int | None = None) -> int:
    """Memory for everything, all weights included.

    Args:
        process: bytes of the process itself; None estimates them.
    """
    return (process_bytes(footprints) if process is None else process) + sum(p.total for p in footprints)


def memory_room(wanted: int | None) -> int:
    """Bytes that everything may take: what was asked for, but no more than is available.

    This includes what the process already holds. If nothing was asked for, a margin is left to other
    programs.
    """
    room = available_memory() + min(psutil.Process().memory_info().rss, PROCESS_BYTES)
    return min(wanted, room) if wanted is not None else int(room * (1 - _MARGIN))
