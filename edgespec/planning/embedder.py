"""The memory that an embedding model takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgespec.base.option import named
from edgespec.base.units import readable, rounded_up
from edgespec.config import Config
from edgespec.engine.embedder import PASS_TOKENS
from edgespec.errors import MemoryLimitError
from edgespec.files.user_folders import cache_folder
from edgespec.llama.dry_run import AllocationStore, EmbeddingContextShape
from edgespec.machine.cores import default_threads
from edgespec.machine.memory import PROCESS_BYTES, FreeMemory
from edgespec.models.gguf.embedding import EmbeddingShape
from edgespec.models.gguf.footprint import footprint, vocabulary_bytes, work_bytes
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.needs import LATER_BYTES, measured_process_bytes, with_second_copy

SEQUENCES = 64  # of a pass
_ROWS = 128  # of a pass over a sequence that is read in pieces: each row costs logits, which nobody reads
_FLOAT = 4


@dataclass(frozen=True)
class EmbedderPlan:
    """The sizes of an embedding model's context, and the memory that everything takes."""

    name: str
    shape: EmbeddingShape  # of the model
    context: int  # maximum tokens of an input
    # of its context
    n_cells: int
    n_rows: int
    n_threads: int
    needed: int  # bytes of everything, all weights included
    budget: int  # bytes that may be used

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
        """The fit into this machine's memory as JSON; see `fit_report`."""
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
        asked = EmbeddingContextShape(n_cells, n_rows, n_rows, SEQUENCES)
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
