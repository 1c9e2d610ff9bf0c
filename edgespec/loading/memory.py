"""How the memory of target and drafter is planned, before either is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from platformdirs import user_cache_path

from edgespec.drafters.folder_index import MAKING_BYTES
from edgespec.generation.result import MemoryUse
from edgespec.loading.state import LoadState
from edgespec.loading.workers import Spread, plan_for_crew
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.runtime.model import Model
from edgespec.offload.planning.budget import MemoryPlan, bytes_needed, memory_room, plan_memory
from edgespec.offload.planning.needs import ContextOptions, Needs, measure_needs


@dataclass(frozen=True)
class MemoryDecision:
    """What everything needs, and where the target's weights live.

    Attributes:
        spread: which layers are on other machines; None if none are.
    """

    needs: Needs
    plan: MemoryPlan
    spread: Spread | None = None

    @property
    def kernels(self) -> str:
        """Which kernels run, as keys of what is remembered name them."""
        return "plain" if self.plan.kernels_differ else "packed"

    @property
    def places(self) -> str:
        """Which layers are on which machine, for keys; empty if all are here."""
        return f" layers={self.spread.where}" if self.spread is not None else ""

    def use(self, model: Model) -> MemoryUse:
        """What the loaded target takes, for reports."""
        footprints = self.needs.footprints
        use = MemoryUse(budget_bytes=self.plan.budget, resident_bytes=sum(f.weights for f in footprints))
        if self.spread is not None:
            use.resident_bytes -= self.spread.lent_bytes
        if self.plan.stream is not None and model.weights.resident_bytes:
            layers = model.weights.resident_bytes
            use.resident_bytes += self.plan.stream.other_bytes + layers - footprints[0].weights
            use.streamed_bytes_per_pass = model.weights.streamed_bytes
        return use


def decide_memory(target: ModelFiles, drafter: ModelFiles | None, state: LoadState) -> MemoryDecision:
    """Measure what is needed, and plan where weights live; packs streamed layers where that is wanted.

    Raises:
        MemoryLimitError, BackendError, OutputError, StreamError, ModelFileError: as measure_needs and
            plan_memory.
    """
    options = state.options
    lent = state.crew.devices if state.crew is not None else ()
    indexing = 0 if options.draft_from is None else MAKING_BYTES
    needs = measure_needs(
        target,
        drafter,
        ContextOptions(
            options.n_cells,
            options.n_nodes,
            state.n_sequences(),
            state.n_threads,
            options.gpu_layers,
            options.exact,
            options.experts,
            options.kv,
            sum(adapter.header.file_bytes for adapter in state.adapters),
        ),
        budget=memory_room(options.memory) - indexing + sum(device.free for device in lent),
        offload=options.offload,
    )
    needs = replace(needs, process=needs.process + indexing)
    if drafter is not None and needs.footprints[1].weights > needs.footprints[0].weights:
        name = drafter.headers[0].path.name
        state.notes.append(f"The drafter {name} is larger than its target: it is unlikely to pay off.")
    state.needed_bytes = bytes_needed(needs.footprints, needs.process)
    if state.crew is not None:
        plan, spread = plan_for_crew(state.crew, needs, target, state)
        return MemoryDecision(needs, plan, spread)
    packs = user_cache_path("edgespec") / "packs"
    plan = plan_memory(
        options.for_memory, needs.footprints, target, packs, state.on_progress, needs.process, needs.rows
    )
    state.notes += plan.notes
    return MemoryDecision(needs, plan)
