"""Loading embedding models: `edgespec.load_embedder`."""

from __future__ import annotations

import os

from edgespec.base.option import named
from edgespec.base.progress import Progress, no_progress
from edgespec.config import Config
from edgespec.engine.embedder import Embedder
from edgespec.errors import UsageError
from edgespec.llama.embedding import EmbeddingContext
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.loading.arguments import checked_config
from edgespec.loading.load import try_kernels
from edgespec.loading.models import open_model
from edgespec.loading.state import LoadState
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.embedding import embedding_shape, require_embeddings
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.planning.embedder import SEQUENCES, plan_embedder
from edgespec.planning.serving_context import serving_context

_USED = ("model", "context", "memory", "threads")
# Options that `serve` sets by itself, and that concern answers only.
_UNNAMED = ("prompt_cache", "prompt_cache_size", "parallel", "leave_out_missing", "learn")


def names_embedder(config: Config, on_progress: Progress | None = None) -> bool:
    """Tell whether the model of a configuration is an embedding model; raises as `catalog.find`."""
    return embedding_shape(read_header(catalog.find(config.model.name, on_progress))) is not None


def usual_context(config: Config, on_progress: Progress | None = None) -> int:
    """The context in which a server loads the model of a configuration; raises as `catalog.find`."""
    header = read_header(catalog.find(config.model.name, on_progress))
    budget = FreeMemory.read().budget(config.memory.limit)
    return serving_context(header, config.model.context, budget, config.model.kv)


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
            n_sequences=SEQUENCES,
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
            ranks=shape.ranks,
            description=f"{path.name}, pooling {shape.pooling}",
            warnings=state.warnings,
            notes=state.notes,
        )
