"""The context of a Gemma 4 assistant: it computes in the cells of its target.

An assistant has no keys and values of its own. llama.cpp gives its context the cells of the target's, and
the keys and values of the target's last layer with a sliding window and of the last one without. Its rows
enter no cell: each sees the text of its sequence as the target has cached it, and no other row.

llama.cpp does not protect these cells. Setting the context up empties them, and so would clearing it; what
edits sequences is ignored. A row must have the position behind the last one that the target has cached of its
sequence, and as many cells as there are rows must be free, although they are not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.heads.shared.head_context import HeadContext
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.model import Model


class AssistantContext(HeadContext):
    """A context of an assistant beside its target's, whose cells it shares; empties them.

    Args:
        beside: the target's context. It must stay open as long as this one computes.
        n_cells: has no effect: there are as many as the target has.
    """

    def __init__(
        self,
        model: Model,
        beside: Context | None,
        *,
        n_cells: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
    ) -> None:
        assert beside is not None
        super().__init__(
            model,
            beside,
            n_cells=beside.n_cells,
            n_sequences=n_sequences,
            n_threads=n_threads,
            abort=abort,
        )
        self.width = model.output_width
        beside.clear()  # the cells are empty, so the next rows take the first ones

    def draft(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], features: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Read tokens behind what the target has cached of their sequences.

        Args:
            positions: for each token, the number of tokens that the target has cached of its sequence.
            sequences: the target's id of the sequence of each.
            features: (tokens, width) of the token before each.

        Returns:
            The logits (tokens, n_vocab) after each, a view that is valid until the next decode; and the
            features (tokens, width) of each.

        Raises:
            DecodeAborted: the abort flag was set.
            NoRoomInCache: too few cells are free.
            BackendError: llama.cpp refused the rows, or a context is closed.
        """
        rows = len(tokens)
        self.decode(
            TokenBatch(
                tokens=np.asarray(tokens, dtype=np.int32),
                positions=np.asarray(positions, dtype=np.int32),
                sequence_ids=np.asarray(sequences, dtype=np.int32),
                offsets=np.arange(rows + 1, dtype=np.int64),
                wants_logits=np.ones(rows, dtype=np.bool_),
                features=features,
            )
        )
        return self.logits(), self.features(rows)

    def draft_from_zeros(self, known: int) -> None:
        """Draft a token as if the target's last state were zero; see HeadContext."""
        self.draft([0], [known], [0], np.zeros((1, self.width), dtype=np.float32))

    def clear(self) -> None:
        """Leave the cells alone: they are the target's."""
