"""The key-value cache of one text with branches at its end.

llama.cpp tells branches apart by sequence ids: a row attends to the cells that share its first id. Here
ids 0 .. paths - 1 all hold the committed text; the rows of a tree carry the ids of the leaves below
them. Committing a path gives its cells to every id, so that the long text is never copied, only its end.

With `ordered`, new rows always take cells behind all earlier ones, so that every query sums its cells in
the order plain decoding would, and rounding is the same: rejected cells are not freed, as later tokens
would fill them out of order, but parked under a graveyard id that no query uses. When the tail runs out,
they are freed, and the text is moved to consecutive cells part by part, bit for bit. A part is all that is
ever copied, so that a long text needs no second one's memory.
"""

from __future__ import annotations

import ctypes

from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context, NoRoomInCache

PART = 128  # tokens that are moved at a time


class BranchingCache:
    """Which cells belong to the committed text, and which to branches being tried.

    Attributes:
        length: committed tokens.
        max_paths: most leaves a tree may have.
        compactions: how often the cells were moved together.
        saves_parts: the states of parts of the text can be saved, and put back one after the other.
    """

    saves_parts = True

    def __init__(self, context: Context, *, ordered: bool) -> None:
        self.context = context
        self.ordered = ordered
        # Ordered caches keep two ids back: for rows nobody reads, and for rejected cells.
        self.max_paths = context.n_sequences - (2 if ordered else 0)
        self.length = 0
        self.compactions = 0
        self._padding_id = context.n_sequences - 2
        self._graveyard_id = context.n_sequences - 1
        self._open = 1  # ids 0 .. _open - 1 hold the committed text
        self._tail = 0  # no cell at or behind this one is in use

    @property
    def open_paths(self) -> int:
        """How many ids hold the committed text."""
        return self._open

    def open(self, paths: int) -> None:
        """Let ids 0 .. paths - 1 hold the committed text."""
        for path in range(self._open, paths):
            self.context.copy(0, path, 0, self.length)
        self._open = max(self._open, paths)

    def append(self, batch: Batch, rows: int = 0) -> None:
        """Decode consecutive tokens that are part of the text from the start, padded to `rows`."""
        self._decode(batch, rows)
        self.length += len(batch)

    def try_branches(self, batch: Batch, rows: int = 0, certain: int = 0) -> None:
        """Decode rows behind the committed text, of which `commit` keeps one path.

        Args:
            batch: rows in ids 0 .. paths - 1, which must be open.
            rows: pad to this many rows, so that the row count does not choose the kernels; for
                ordered caches.
            certain: leading rows that `commit` is going to keep in any case.
        """
        self._decode(batch, rows)

    def fork(self, path: int, new_path: int, length: int) -> None:
        """Let `new_path`, which must be open, share the branch of `path` up to `length` tokens."""
        if length > self.length:
            self.context.copy(path, new_path, self.length, length)

    def commit(self, path: int, n_tokens: int, used_paths: int, n_rows: int) -> None:
        """Keep the first `n_tokens` of a branch and drop everything else that was tried.

        Args:
            path: an id that holds the branch.
            n_tokens: tokens of it to keep.
            used_paths: ids 0 .. used_paths - 1 were tried.
            n_rows: rows that were tried in all.
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

        Calls claim less text before they take any away, and more only when it is there. So the first
        `length` tokens are in id 0, whatever happened; nothing else is certain.
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
        """Forget what stands behind `length` at the end of an answer, as plain decoding never read it."""
        self.rewind(length)

    def compact(self) -> None:
        """Move the text's cells to the front, in order, and free all others; for ordered caches.

        If an exception ends it, the text is forgotten.
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
        """Move a part of the text to the first free cells; what comes before it must be in place.

        The cells up to the next part's are then free but for those before, and at least as many as this
        part's tokens. llama.cpp fills the first free ones, in order.
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
        """The keys and values of the text's tokens start .. end - 1, exact."""
        spare = self._spare_id()
        self.context.copy(0, spare, start, end)
        state = self.context.save(spare)
        self.context.remove(spare)
        return state

    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        """Put the saved keys and values of the next `n_tokens` tokens behind the text.

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
        """An id that no cell has: where padding goes, or the last, taken from the text's branches."""
        if self.ordered:
            return self._padding_id
        spare = self.context.n_sequences - 1
        if self._open > spare:
            self.context.remove(spare)
            self._open = spare
        return spare

    def _decode(self, batch: Batch, rows: int) -> None:
        padded = batch.padded(rows, self._padding_id)
        # Unordered caches reuse freed cells wherever they lie, so only llama.cpp knows when they are full.
        if self.ordered and self._tail + len(padded) > self.context.n_cells:
            self.compact()
            if self._tail + len(padded) > self.context.n_cells:
                raise NoRoomInCache(self.context.n_cells)
        self.context.decode(padded)
        self._tail = min(self._tail + len(padded), self.context.n_cells)
        if len(padded) > len(batch):
            self.context.copy(self._padding_id, self._graveyard_id, 0, -1)
            self.context.remove(self._padding_id)
