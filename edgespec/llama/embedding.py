"""Contexts that compute embeddings, or scores: one vector for each sequence of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgespec.errors import BackendError
from edgespec.kernels.bindings import llama_cpp
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.model import Model


class EmbeddingContext(Context):
    """A context of an embedding model, which pools as its file says.

    Args:
        n_rows: most tokens of a pass. A model that does not read in pieces needs them for a whole sequence.

    Attributes:
        width: elements of an embedding.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_cells: int,
        n_rows: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
    ) -> None:
        super().__init__(
            model,
            n_cells=n_cells,
            n_rows=n_rows,
            n_outputs=n_rows,
            n_sequences=1 if model.keeps_recurrent_state else n_sequences,
            n_threads=n_threads,
            abort=abort,
            embeds=True,
        )
        ranks = llama_cpp.llama_pooling_type(self.handle) == llama_cpp.LLAMA_POOLING_TYPE_RANK
        self.width = model.n_scores if ranks else model.output_width

    def embed(self, sequences: Sequence[Sequence[int]]) -> FloatArray:
        """(sequences, width) Their embeddings, as the model pools them.

        Args:
            sequences: tokens, at least one in each; together they have no more than there are cells, and a
                model that does not read in pieces takes them in a single pass.

        Raises:
            DecodeAborted, NoRoomInCache, BackendError, ModelFileError: as `Context.decode`.
        """
        rows = TokenBatch.joined([_rows(tokens, number) for number, tokens in enumerate(sequences)])
        found = np.empty((len(sequences), self.width), dtype=np.float32)
        self.clear()
        for start in range(0, len(rows), self.n_rows):
            piece = rows.part(start, start + self.n_rows)
            ends = piece.sequence_ids[piece.wants_logits]
            # Pooling takes the outputs of all rows. A piece without an end needs none, and each costs logits.
            pools = bool(len(ends))
            llama_cpp.llama_set_embeddings(self.handle, pools)
            self.decode(replace(piece, wants_logits=np.full(len(piece), pools)))
            self.synchronize()
            for number in ends.tolist():
                vector = llama_cpp.llama_get_embeddings_seq(self.handle, number)
                if not vector:
                    raise BackendError(f"'{self.model.path.name}' computes no embeddings.")
                found[number] = np.ctypeslib.as_array(vector, (self.width,))
        return found

    def clear(self) -> None:
        """Empty the cache, if there is one: encoders have none."""
        if self._memory_handle:
            super().clear()

    def _forget(self, batch: TokenBatch) -> None:
        self.clear()


def _rows(tokens: Sequence[int], number: int) -> TokenBatch:
    """The rows of one sequence; the last one is marked."""
    batch = TokenBatch.run(tokens, 0, n_sequences=1, logits="last")
    return batch.with_sequences(np.full(len(batch), number, dtype=np.int32))
