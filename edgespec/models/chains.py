"""The cache of a model that keeps a running state: one text, one guess at its end, no branches.

Recurrent and hybrid models fold each token into a state and cannot forget the last few again. So the
state is saved before a guess is read, and put back if the guess was wrong; the part of it that was right
is then read once more.
"""

from __future__ import annotations

import ctypes

from edgespec.models.batch import Batch
from edgespec.models.runtime import Context


class ChainCache:
    """The same verbs as BranchingCache, for a single path."""

    ordered = False
    max_paths = 1
    open_paths = 1
    compactions = 0
    saves_parts = False

    def __init__(self, context: Context) -> None:
        self.context = context
        self.length = 0
        self._saved: ctypes.Array[ctypes.c_uint8] | None = None
        self._tried: list[int] = []

    def open(self, paths: int) -> None:
        """Nothing to do: there is one path."""

    def fork(self, path: int, new_path: int, length: int) -> None:
        """Never called: there is one path."""

    def append(self, batch: Batch, rows: int = 0) -> None:
        """Decode consecutive tokens that are part of the text from the start."""
        self.context.decode(batch)
        self.length += len(batch)

    def try_branches(self, batch: Batch, rows: int = 0) -> None:
        """Decode a guess behind the text, of which `commit` keeps the beginning."""
        if not self._tried:
            self._saved = self.context.save(0) if self.length else None
        self._tried += batch.tokens.tolist()
        self.context.decode(batch)

    def commit(self, path: int, n_tokens: int, used_paths: int, n_rows: int) -> None:
        """Keep the first `n_tokens` of the guess."""
        right, self._tried = self._tried[:n_tokens], []
        if n_tokens < n_rows:
            self.context.clear()
            if self._saved is not None:
                self.context.restore(0, self._saved)
            if right:
                self.context.decode(Batch.run(right, self.length, n_sequences=1))
        self.length += n_tokens

    def rewind(self, length: int) -> None:
        """Forget everything, if anything must be forgotten: a running state has no way back."""
        if length < self.length:
            self.clear()

    def settle(self, length: int) -> None:
        """Keep the state: tokens behind `length` are dropped when the next text differs there."""

    def compact(self) -> None:
        """Nothing to do: a state has no cells."""

    def clear(self) -> None:
        """Forget the text."""
        self.context.clear()
        self.length = 0
        self._saved = None
        self._tried = []

    def save(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        """The state after the whole text; there are no parts."""
        return self.context.save(0)

    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        """Put the state after a text of `n_tokens` tokens back.

        Raises:
            BackendError: llama.cpp refused the state; the text is forgotten.
        """
        self.clear()
        self.context.restore(0, state)
        self.length = n_tokens
