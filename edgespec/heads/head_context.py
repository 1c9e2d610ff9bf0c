"""The contexts of draft heads: they make features of a target's hidden states, and read tokens beside them.

A head reads rows of a token and the feature of the token before it, and gives logits and a feature of its own
for each, which takes the place of the target's for drafted tokens. Features are made of the target's hidden
states by the encoder of an EAGLE-3 head. For other heads, they are these states.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.model import Model

HEAD_ROWS = 64  # of a decode: the head computes the logits of all of them, wanted or not
# For texts and branches; encoding takes one more. llama.cpp plans a row of logits for each sequence, and
# aborts where they are more than the rows of a decode.
MAX_HEAD_SEQUENCES = HEAD_ROWS - 1


class HeadContext(Context):
    """A context of a head; families whose features are not their target's last states have their own class.

    That leaves layers for multi-token prediction, whose model is the target or a file of these layers.

    Every decode must want the logits of all its rows, or of none: the head computes all of them, and
    llama.cpp keeps the first ones.

    Args:
        beside: the target's context, whose model the head borrows matrices of; None for layers of the target.

    Attributes:
        width: elements of a feature.

    Raises:
        UnsupportedBuild: this llama.cpp build has no heads.
    """

    _encoding_sequences = 0  # sequences that encoding takes, besides those of texts

    def __init__(
        self,
        model: Model,
        beside: Context | None = None,
        *,
        n_cells: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
    ) -> None:
        n_sequences = min(n_sequences, MAX_HEAD_SEQUENCES)
        super().__init__(
            model,
            n_cells=n_cells,
            n_rows=HEAD_ROWS,
            n_outputs=HEAD_ROWS,
            n_sequences=n_sequences + self._encoding_sequences,
            n_threads=n_threads,
            abort=abort,
            beside=beside,
            mtp=beside is None,
        )
        self.n_sequences = n_sequences
        self.n_outputs = HEAD_ROWS
        self.width = model.width
        nextn.keep_features(self)

    @property
    def shown_width(self) -> int:
        """Elements of what the target shows of each token."""
        return self.width

    def encode(self, hidden: FloatArray) -> FloatArray:
        """The features (tokens, width) of tokens: their hidden states themselves, if there is no encoder.

        Args:
            hidden: (tokens, shown_width) their hidden states.

        Raises:
            DecodeAborted: the abort flag was set.
        """
        return hidden

    def features(self, rows: int) -> FloatArray:
        """(rows, width) of the first rows of the last call whose outputs were wanted: a copy."""
        return nextn.kept_rows(self, rows, self.width, "features").copy()

    def draft_from_zeros(self, known: int) -> None:
        """Draft as if all that the head reads of its target were zero, and then from its own features.

        Args:
            known: tokens that the target has cached of sequence 0.
        """
        features = self.encode(np.zeros((known, self.shown_width), dtype=np.float32))
        for start in (0, known):
            rows = TokenBatch.run([0] * known, start, n_sequences=1, logits="all")
            self.decode(replace(rows, features=features))
            self.logits()
            features = self.features(known)
