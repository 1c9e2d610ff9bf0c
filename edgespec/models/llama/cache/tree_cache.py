"""The key-value cache of one text with branches at its end.

llama.cpp distinguishes branches by sequence ids: a row attends to the cells that have its first id. Here ids
0 .. paths - 1 all hold the committed text, and a tree's row has the ids of the leaves below it. Committing a
path gives its cells to every id, so only the end of the text is ever updated.

With `ordered`, new rows always take cells after all earlier ones, so that every query sums its cells in the
same order as plain decoding, with the same rounding. Rejected cells are not freed, because later tokens would
fill them out of order, but parked under a graveyard id that no query uses. When the tail is full, they are
freed, and the text is moved to consecutive cells part by part, bit for bit. Only one part is copied at a
time, so a long text never takes its memory twice.
"""

from __future__ import annotations

import ctypes

from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context, NoRoomInCache

PART = 128  # tokens that are moved at a time


class BranchingCache:
    """Tracks which cells belong to the committed text, and which to branches being verified.

    Attributes:
        length: committed tokens.
        max_paths: most leaves a tree may have.
        compactions: how often the text was moved to the front.
        saves_parts: the states of parts of the text can be saved, and restored one after the other.
    """

    saves_parts = True

    def __init__(self, context: Context, *, ordered: bool) -> None:
        self.context = context
        self.ordered = ordered
        # Ordered caches reserve two ids: for padding, and for rejected cells.
        self.max_paths = context.n_sequences - (2 if ordered else 0)
        self.length = 0
        self.compactions = 0
        self._padding_id = context.n_sequences - 2
        self._graveyard_id = context.n_sequences - 1
        self._open = 1  # ids 0 .. _open - 1 hold the committed text
        self._tail = 0  # no cell from this one on is in use

    @property
    def open_paths(self) -> int:
        """How many ids hold the committed text."""
        return self._open

    def open(self, paths: int) -> None:
        """Make ids 0 .. paths - 1 hold the committed text."""
        for path in range(self._open, paths):
            self.context.copy(0, path, 0, self.length)
        self._open = max(self._open, paths)

    def append(self, batch: Batch, rows: int = 0) -> None:
        """Decode consecutive tokens that belong to the text, padded to `rows`."""
        self._decode(batch, rows)
        self.length += len(batch)

    def try_branches(self, batch: Batch, rows: int = 0, certain: int = 0) -> None:
        """Decode rows after the committed text, of which `commit` keeps one path.

        Args:
            batch: rows in ids 0 .. paths - 1, which must be open.
            rows: pad to this many rows, so that the row count does not choose the kernels; for
                ordered caches.
            certain: leading rows that `commit` will keep in any case.
        """
        self._decode(batch, rows)

    def fork(self, path: int, new_path: int, length: int) -> None:
        """Make `new_path`, which must be open, share the branch of `path` up to `length` tokens."""
        if length > self.length:
            self.context.copy(path, new_path, self.length, length)

    def commit(self, path: int, n_tokens: int, used_paths: int, n_rows: int) -> None:
        """Keep the first `n_tokens` of a branch and drop everything else that was tried.

        Args:
            path: an id that holds the branch.
            n_tokens: tokens of it to keep.
            used_paths: ids 0 .. used_paths - 1 were tried.
            n_rows: rows that were tried in total.
        """
        start, end = self.length, self.length + n_tokens
        if n_tokens < n_rows:
            if self.ordered:
                for other in range(used_paths):
                    self.context.copy(other, self._graveyard_id, start, -1)
            for other in range(used_paths):
                self.context.remove(other, start if other != path else end)
        if n_tokens:
            for other in range(self._open):
                if other != path:
                    self.context.copy(path, other, start, end)
        self.length = end

    def recover(self) -> None:
        """Drop everything but the committed text, wherever the last call was interrupted.

        Calls reduce `length` before they remove text, and increase it only after they have added some. So the
        first `length` tokens are in id 0 whatever happened; nothing else is certain.
        """
        for path in range(1, self.context.n_sequences):
            if not self.ordered or path != self._graveyard_id:
                self.context.remove(path)
        self.context.remove(0, self.length)
        self._open = 1

    def rewind(self, length: int) -> None:
        """Forget the committed text from `length` on."""
        if length < self.length:
            self.length = length
            for path in range(self._open):
                self.context.remove(path, length)

    def settle(self, length: int) -> None:
        """Forget what follows `length` at the end of an answer: plain decoding would not have read it."""
        self.rewind(length)

    def compact(self) -> None:
        """Move the text's cells to the front, in order, and free all others; for ordered caches.

        If an exception interrupts this, the text is forgotten.
        """
        if self._tail == self.length:
            return
        paths, length = self._open, self.length
        self.length = 0  # until all of it is in place again
        try:
            for other in range(1, self.context.n_sequences):
                self.context.remove(other)
            self._open = 1
            for start in range(0, length, PART):
                self._move_to_front(start, min(start + PART, length))
        except BaseException:
            self.clear()
            raise
        self.length = self._tail = length
        self.open(paths)
        self.compactions += 1

    def _move_to_front(self, start: int, end: int) -> None:
        """Move a part of the text to the first free cells; the parts before it must be in place.

        All cells between those parts and the next one are free, and enough for this part. llama.cpp fills the
        first free cells in order.
        """
        state = self.save(start, end)
        self.context.remove(0, start, end)
        spare = self._spare_id()
        self.context.restore(spare, state)
        self.context.copy(spare, 0, start, end)
        self.context.remove(spare)

    def clear(self) -> None:
        """Forget the text."""
        self.length = 0
        self.context.clear()
        self._tail = 0

    def save(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        """The keys and values of the text's tokens start .. end - 1, lossless."""
        spare = self._spare_id()
        self.context.copy(0, spare, start, end)
        state = self.context.save(spare)
        self.context.remove(spare)
        return state

    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        """Restore the saved keys and values of the next `n_tokens` tokens after the text.

        Raises:
            NoRoomInCache: too few free cells.
            BackendError: llama.cpp refused the state; the text is as it was.
        """
        if self.ordered:
            self.compact()
        if self.length + n_tokens > self.context.n_cells:
            raise NoRoomInCache(self.context.n_cells)
        spare = self._spare_id()
        self.context.restore(spare, state)
        for path in range(self._open):
            self.context.copy(spare, path, 0, -1)
        self.context.remove(spare)
        self.length += n_tokens
        self._tail = self.length

    def _spare_id(self) -> int:
        """An id that no cell has: that of padding, or the last one, after the text has given it up."""
        if self.ordered:
            return self._padding_id
        spare = self.context.n_sequences - 1
        if self._open > spare:
            self.context.remove(spare)
            self._open = spare
        return spare

    def _decode(self, batch: Batch, rows: int) -> None:
        padded = batch.padded(rows, self._padding_id)
        # Unordered caches reuse freed cells anywhere, so only llama.cpp knows when they are full.
        if self.ordered and self._tail + len(padded) > self.context.n_cells:
            self.compact()
            if self._tail + len(padded) > self.context.n_cells:
                raise NoRoomInCache(self.context.n_cells)
        self.context.decode(padded)
        self._tail = min(self._tail + len(padded), self.context.n_cells)
        if len(padded) > len(batch):
            self.context.copy(self._padding_id, self._graveyard_id, 0, -1)
            self.context.remove(self._padding_id)
