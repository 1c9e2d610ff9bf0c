"""Loading embedding models: the memory that they take, and `edgespec.load_embedder`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from edgespec.arguments import check_type
from edgespec.config import Config
from edgespec.engine.embedder import PASS_TOKENS, Embedder
from edgespec.errors import MemoryLimitError, UsageError
from edgespec.files.user_folders import cache_folder
from edgespec.llama.embedding import EmbeddingContext
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.llama.trials.dry_run import AllocationStore, EmbeddingContextShape
from edgespec.loading.arguments import checked_config
from edgespec.loading.load import try_kernels
from edgespec.loading.models import open_model
from edgespec.loading.state import LoadState
from edgespec.machine.cores import default_threads
from edgespec.machine.memory import PROCESS_BYTES, FreeMemory
from edgespec.models.gguf.embedding import EmbeddingShape, embedding_shape, require_embeddings
from edgespec.models.gguf.footprint import footprint, vocabulary_bytes, work_bytes
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.offload.planning.needs import LATER_BYTES, measured_process_bytes, with_second_copy
from edgespec.option import named
from edgespec.progress import Progress, no_progress
from edgespec.units import readable, rounded_up

_SEQUENCES = 64  # of a pass
_ROWS = 128  # of a pass over a sequence that is read in pieces: each row costs logits, which nobody reads
_FLOAT = 4
_USED = ("model", "context", "memory", "threads")
# Options that `serve` sets by itself, and that concern answers only.
_UNNAMED = ("prompt_cache", "prompt_cache_size", "parallel", "leave_out_missing", "learn")


@dataclass(frozen=True)
class EmbedderPlan:
    """The sizes of an embedding model's context, and the memory that everything takes.

    Attributes:
        shape: of the model.
        context: maximum tokens of an input.
        n_cells, n_rows, n_threads: of its context.
        needed: bytes of everything, all weights included.
        budget: bytes that may be used.
    """

    name: str
    shape: EmbeddingShape
    context: int
    n_cells: int
    n_rows: int
    n_threads: int
    needed: int
    budget: int

    @property
    def fits(self) -> bool:
        """True if there is enough memory."""
        return self.needed <= self.budget

    def require_room(self) -> None:
        """Refuse a model that does not fit: embedding models are not streamed.

        Raises:
            MemoryLimitError: it does not.
        """
        if not self.fits:
            raise MemoryLimitError(
                f"{self.name} with inputs of {self.context} tokens needs "
                f"{readable(rounded_up(self.needed))} of memory, "
                f"and there are {readable(self.budget)}. Embedding models are not streamed from disk.",
                f"Raise {named('memory')}, lower {named('context')}, or use a smaller model.",
                least=self.needed,
            )

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "model": self.name,
            "embeds": True,
            "pooling": self.shape.pooling,
            "dimensions": self.shape.width,
            "context": self.context,
            "needed_bytes": self.needed,
            "budget_bytes": self.budget,
            "threads": self.n_threads,
        }

    def fit(self) -> dict[str, Any]:
        """The fit into this machine's memory as JSON; see offload.planning.fit."""
        return {
            "available_bytes": self.budget,
            "needed_bytes": self.needed,
            "context": self.context,
            "verdict": "fits" if self.fits else "too large",
            "resident_bytes": self.needed if self.fits else 0,
            "streamed_bytes_per_pass": 0,
            "least_bytes": self.needed,
        }


def plan_embedder(
    files: ModelFiles, shape: EmbeddingShape, config: Config, *, measured: bool
) -> EmbedderPlan:
    """Plan an embedding model, which is held in memory.

    Args:
        measured: the file is here and vetted: find by a dry run what its context allocates.

    Raises:
        ModelFileError, MemoryLimitError: llama.cpp cannot load the file, or plan its context.
    """
    header = files.headers[0]
    context = min(config.model.context, shape.context or config.model.context)
    n_cells = max(context, PASS_TOKENS)
    n_rows = _ROWS if shape.in_pieces else n_cells
    threads = config.devices.threads or default_threads()
    process = measured_process_bytes() if measured else PROCESS_BYTES
    size = footprint(files, n_cells=n_cells, n_outputs=n_rows, n_rows=n_rows, n_threads=threads)
    if measured:
        asked = EmbeddingContextShape(n_cells, n_rows, n_rows, _SEQUENCES)
        found = AllocationStore(cache_folder() / "allocations").get(header, [asked])
        if found is not None:
            # llama.cpp makes its outputs as large as a pass needs: logits and states of every row.
            outputs = n_rows * (header.n_vocab + shape.width) * _FLOAT
            work = work_bytes(files.headers, n_rows, threads, n_cells)
            size = replace(size, cache=found[0].cache, buffers=found[0].buffers + outputs + work)
    size = with_second_copy(size, files)
    return EmbedderPlan(
        header.path.name,
        shape,
        context,
        n_cells,
        n_rows,
        threads,
        needed=process + LATER_BYTES + vocabulary_bytes(header) + size.total,
        budget=FreeMemory.read().budget(config.memory.limit),
    )


def names_embedder(config: Config, on_progress: Progress | None = None) -> bool:
    """Tell whether the model of a configuration is an embedding model; raises as `catalog.find`."""
    return embedding_shape(read_header(catalog.find(config.model.name, on_progress))) is not None


def load_embedder(
    model: str | os.PathLike[str],
    *,
    context: int | None = None,
    memory: int | str | None = None,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Embedder:
    """Load an embedding model, all of it into memory.

    Args:
        model: GGUF file or model name, as for `load`.
        context: Maximum tokens of an input. Default: 4096, or as many as the model was trained for.
        memory: Memory limit, in bytes or as a size such as "2GiB". Default: all available memory.
        threads: CPU threads. Default: one per physical core.
        on_progress: Called with what is being done and the fraction done.

    Raises:
        EdgeSpecError: by kind: UsageError, ModelFileError, HubError, MemoryLimitError, BackendError.
    """
    check_type("on_progress", on_progress, Progress | None)
    given = {"model": model, "memory": memory, "threads": threads} | ({"context": context} if context else {})
    return open_embedder(checked_config(given), on_progress)


def open_embedder(config: Config, on_progress: Progress | None = None) -> Embedder:
    """Load the embedding model of a configuration; raises as `load_embedder`."""
    path = catalog.find(config.model.name, on_progress)
    state = LoadState(config, on_progress or no_progress)
    with state.undone_on_failure():
        header = read_header(path)
        shape = require_embeddings(header)
        if config.model.lora:
            raise UsageError(f"{path.name} is an embedding model.", f"Leave out {named('lora')}.")
        try_kernels(state)
        files = ModelFiles.of(header)
        require_loadable(files.headers)
        plan = plan_embedder(files, shape, config, measured=True)
        plan.require_room()
        model = open_model(path, state, memory_map=False)
        computing = EmbeddingContext(
            model,
            n_cells=plan.n_cells,
            n_rows=plan.n_rows,
            n_sequences=_SEQUENCES,
            n_threads=plan.n_threads,
            abort=state.abort,
        )
        unused = [name for name in config.arguments() if name not in (*_USED, *_UNNAMED)]
        state.warnings += [f"{named(name)} has no effect on an embedding model." for name in unused]
        return Embedder(
            model,
            computing,
            state.abort,
            context=plan.context,
            description=f"{path.name}, pooling {shape.pooling}",
            warnings=state.warnings,
            notes=state.notes,
        )
