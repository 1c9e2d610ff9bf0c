"""The cache of a model with a recurrent state: one sequence with one draft at its end, no branches.

Recurrent and hybrid models fold each token into a state and cannot forget the last few tokens. So the state
is saved before a draft is read. If part of the draft is rejected, the state is restored, and the accepted
part is read again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

from edgespec.llama.cache.positions import Positions
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context


class ChainCache:
    """A KVCache with a single path."""

    ordered = False
    max_paths = 1
    n_free_ids = 0
    n_pending = 0
    open_paths = 1
    compactions = 0
    saves_parts = False

    def __init__(self, context: Context) -> None:
        self.context = context
        self.length = 0
        self.positions = Positions()
        self._saved: tuple[int, ctypes.Array[ctypes.c_uint8]] | None = (
            None  # tokens, and the state after them
        )
        self._tried: list[int] = []

    @property
    def n_live(self) -> int:
        """Tokens of the sequence."""
        return self.length

    def open(self, paths: int) -> None:
        """Do nothing: there is one path."""

    def fork(self, path: int, new_path: int, length: int) -> None:
        """Do nothing: there is one path, and no caller forks it."""

    def append(self, batch: TokenBatch, rows: int = 0) -> None:
        """Decode consecutive tokens that belong to the sequence."""
        self._decode(batch)
        self.appended(len(batch))

    def reserve(self, n_rows: int) -> None:
        """Do nothing: cells are never moved."""

    def _decode(self, batch: TokenBatch) -> None:
        self.context.decode(self.positions.placed(batch))

    def appended(self, n_tokens: int) -> None:
        """Note that the next tokens of the sequence were decoded."""
        self.length += n_tokens

    def try_branches(self, batch: TokenBatch, rows: int = 0, certain: int = 0) -> None:
        """Decode a draft after the sequence, of which `commit` keeps the beginning.

        Args:
            certain: leading rows that `commit` will keep in any case. If that is all of them, the state is
                not saved: nothing can be rejected.
        """
        if not self._tried and len(batch) > certain:
            self._saved = (self.length, self.context.save(0)) if self.length else None
        self._tried += batch.tokens.tolist()
        self._decode(batch)

    def commit(
        self, path: int, n_tokens: int, used_paths: int, n_rows: int, held: Collection[int] = ()
    ) -> None:
        """Keep the first `n_tokens` of the draft."""
        right, self._tried = self._tried[:n_tokens], []
        if n_tokens < n_rows:
            self.recover()
            if right:
                self._decode(TokenBatch.run(right, self.length, n_sequences=1))
        self.length += n_tokens

    def recover(self) -> None:
        """Go back to the last saved state, or to no sequence: the present state is unknown."""
        saved, self.length = self._saved, 0
        self._tried = []
        self.context.clear()
        if saved is not None:
            self.context.restore(0, saved[1])
            self.length = saved[0]

    def rewind(self, length: int) -> None:
        """Forget the whole sequence if any of it must go: a recurrent state cannot go back."""
        if length < self.length:
            self.clear()

    def truncate_to(self, length: int) -> None:
        """Keep the state: tokens after `length` are dropped when the next sequence differs there."""

    def compact(self) -> None:
        """Do nothing: a state has no cells."""

    def clear(self) -> None:
        self.length = 0
        self._saved = None
        self._tried = []
        self.context.clear()

    def close(self) -> None:
        self.clear()

    def save(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        """The state after the whole sequence; there are no parts.

        Raises:
            ValueError: the tokens start .. end - 1 are not the whole sequence.
        """
        if (start, end) != (0, self.length):
            raise ValueError(f"the state after {self.length} tokens is not that of {start} .. {end}")
        return self.context.save(0)

    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        """Restore the state after a sequence of `n_tokens` tokens.

        Raises:
            BackendError: llama.cpp refused the state; the sequence is forgotten.
        """
        self.clear()
        self.context.restore(0, state)
        self.length = n_tokens
