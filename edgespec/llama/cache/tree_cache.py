"""The key-value cache of one sequence with branches at its end, among others that share a context's cells.

llama.cpp distinguishes branches by sequence ids (see `shared_cells`). Each of a sequence's ids holds its
committed tokens, and a tree's row has the ids of the leaves below it. Committing a path gives its cells to
every id, so only the end of the sequence is ever updated.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Sequence

import numpy as np

from edgespec.errors import BackendError
from edgespec.llama.cache.positions import Positions
from edgespec.llama.cache.segments import window_parts
from edgespec.llama.cache.shared_cells import SharedCells
from edgespec.llama.runtime.batch import TokenBatch

_PARTS = b"\xffparts\xff\xff"  # begins several states; llama.cpp's own begin with a small number
_SIZE = struct.Struct("<Q")


class BranchingCache:
    """Tracks which cells belong to the committed sequence, and which to branches being verified.

    Attributes:
        length: committed tokens.
        cells: those of the context, shared with other sequences.
        ids: the sequence ids that hold the committed sequence; a branch is known to callers by its place
            here.
        saves_parts: the states of parts of the sequence can be saved, and restored one after the other.
        positions: of the sequence's tokens; set by whoever has the sequence, before it is longer.
    """

    saves_parts = True
    n_pending = 0

    def __init__(self, cells: SharedCells) -> None:
        self.length = 0
        self.cells = cells
        self.positions = Positions()
        self.ids = [cells.add(self)]

    @property
    def ordered(self) -> bool:
        """True if new rows take cells behind all earlier ones; see SharedCells."""
        return self.cells.ordered

    @property
    def compactions(self) -> int:
        """Number of times that the cells were moved to the front."""
        return self.cells.compactions

    @property
    def n_live(self) -> int:
        """Cells that this sequence and those beside it hold."""
        return self.cells.n_live

    @property
    def n_free_ids(self) -> int:
        """Sequence ids that neither this sequence nor another one has."""
        return self.cells.n_free_ids

    @property
    def max_paths(self) -> int:
        """The maximum number of leaves that a tree may have now."""
        return len(self.ids) + self.n_free_ids

    @property
    def open_paths(self) -> int:
        """Number of ids that hold the committed sequence."""
        return len(self.ids)

    def another(self) -> BranchingCache:
        """An empty sequence in the same cells.

        Raises:
            ValueError: there are as many sequences as sequence ids.
        """
        return BranchingCache(self.cells)

    def inherit(self, source: BranchingCache, length: int) -> None:
        """Share the first `length` cells of another sequence; this one must be empty."""
        self.close_paths()
        self.cells.context.copy(source.ids[0], self.ids[0], 0, self.positions.at(length))
        self.cells.inherited(self, source, length)
        self.length = length

    def open(self, paths: int) -> None:
        """Make paths 0 .. paths - 1 hold the committed sequence."""
        while len(self.ids) < paths:
            path = self.cells.take_id()
            self.cells.context.copy(self.ids[0], path, 0, self.positions.behind(self.length))
            self.ids.append(path)

    def close_paths(self) -> None:
        """Give back all ids but the first; no branch may be in use."""
        while len(self.ids) > 1:
            self.close_path()

    def close_path(self) -> None:
        """Give back the last id."""
        self.cells.context.remove(self.ids[-1])
        self.cells.give_back([self.ids.pop()])

    def numbered(self, batch: TokenBatch) -> TokenBatch:
        """A batch with the sequence's ids instead of the numbers of its paths, and positions for indexes."""
        batch = self.positions.placed(batch)
        if self.ids == list(range(len(self.ids))):
            return batch  # the usual case: a single sequence, which has the first ids
        return batch.with_sequences(np.array(self.ids, dtype=np.int32)[batch.sequence_ids])

    def append(self, batch: TokenBatch, rows: int = 0) -> None:
        """Decode consecutive tokens that belong to the sequence, padded to `rows`."""
        self.cells.decode([(self, batch)], rows)
        self.appended(len(batch))

    def reserve(self, n_rows: int) -> None:
        """Prepare for appending so many rows; raises NoRoomInCache."""
        self.cells.reserve(n_rows)

    def appended(self, n_tokens: int) -> None:
        """Note that the next tokens of the sequence were decoded."""
        self.cells.committed(self, self.length, self.length + n_tokens)
        self.length += n_tokens

    def try_branches(self, batch: TokenBatch, rows: int = 0, certain: int = 0) -> None:
        """Decode rows after the committed sequence, of which `commit` keeps one path.

        Args:
            batch: rows in paths 0 .. paths - 1, which must be open.
            rows: pad to this many rows, so that the row count does not choose the kernels; for
                ordered caches.
            certain: leading rows that `commit` will keep in any case.
        """
        self.cells.decode([(self, batch)], rows)
        self.cells.keep_branches(self, batch)

    def fork(self, path: int, new_path: int, length: int) -> None:
        """Make `new_path`, which must be open, share the branch of `path` up to `length` tokens."""
        if length > self.length:
            start, end = self.positions.at(self.length), self.positions.at(length)
            self.cells.context.copy(self.ids[path], self.ids[new_path], start, end)

    def commit(
        self, path: int, n_tokens: int, used_paths: int, n_rows: int, held: Collection[int] = ()
    ) -> None:
        """Keep the first `n_tokens` of a branch and drop everything else that was tried.

        Args:
            path: the branch.
            n_tokens: tokens of it to keep.
            used_paths: paths 0 .. used_paths - 1 were tried.
            n_rows: rows that were tried in total.
            held: paths whose branches extend these tokens, kept as branches; for cells that are not ordered.
                They must be dropped by another `commit` before a sequence joins those that share the cells.
        """
        context, kept = self.cells.context, self.ids[path]
        branches = {self.ids[other] for other in held}
        assert not (branches and self.ordered)
        length = self.length + n_tokens
        start, end = self.positions.at(self.length), self.positions.at(length)
        if n_tokens < n_rows:
            if self.ordered:
                for other in self.ids[:used_paths]:
                    self.cells.park(other, start)
            for other in self.ids[:used_paths]:
                if other not in branches:
                    context.remove(other, start if other != kept else end)
        if n_tokens:
            for other in self.ids:
                if other != kept and other not in branches:
                    context.copy(kept, other, start, end)
        self.cells.branches_dropped(self, start, all_of_them=not branches)
        self.cells.committed(self, self.length, length)
        self.length = length
        if self.cells.shared and not branches:
            self.close_paths()  # other sequences may need the ids

    def recover(self) -> None:
        """Drop everything but the committed sequences, wherever the last call was interrupted."""
        self.cells.recover()

    def rewind(self, length: int) -> None:
        """Forget the committed sequence from `length` on."""
        if length < self.length:
            assert self.positions.floor(length) == length, "an image is kept as a whole"
            self.length = length
            position = self.positions.at(length)
            if self.ordered and self.cells.shared:
                self.cells.park(self.ids[0], position)  # other sequences must not fill the gap
            for path in self.ids:
                self.cells.context.remove(path, position)
            self.cells.truncated(self, length)

    def cut(self, start: int, end: int) -> bool:
        """Take tokens start .. end - 1 out of the committed sequence; the positions of what follows move up.

        That turns the keys that were computed with other positions, so it is for drafts alone. Cells that are
        shared with other sequences would move for these too.

        Returns:
            False if that cannot be done, and nothing has changed.
        """
        context = self.cells.context
        if self.ordered or self.cells.shared or not context.can_shift:
            return False
        length, self.length = self.length, start
        for path in self.ids:
            context.remove(path, start, end)
        self.cells.removed(start)
        context.shift(self.ids[0], end, start - end)  # cells of all paths
        self.length = length - (end - start)
        return True

    def truncate_to(self, length: int) -> None:
        """Forget what follows `length` at the end of an answer: plain decoding would not have read it."""
        self.rewind(length)

    def compact(self) -> None:
        """Make all free cells consecutive; for ordered caches."""
        self.cells.compact()

    def clear(self) -> None:
        """Forget this sequence and all others in the same cells."""
        self.cells.clear()

    def close(self) -> None:
        """Forget the sequence, and give back its sequence ids; it cannot be used any more."""
        self.close_paths()
        self.rewind(0)
        self.cells.remove(self)

    def save(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        """The keys and values of the sequence's tokens start .. end - 1, lossless."""
        states = [self._saved(*part) for part in window_parts(start, end, self.cells.context.window)]
        return states[0] if len(states) == 1 else _joined(states)

    def _saved(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        context, spare = self.cells.context, self.cells.spare_id()
        context.copy(self.ids[0], spare, self.positions.at(start), self.positions.at(end))
        state = context.save(spare)
        context.remove(spare)
        return state

    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        """Restore the saved keys and values of the next `n_tokens` tokens after the sequence.

        Raises:
            NoRoomInCache: too few free cells.
            BackendError: llama.cpp refused the state; the sequence is as it was.
        """
        states = _divided(state)
        start = self.length
        ends = [start + n_tokens]
        if len(states) > 1:
            ends = [end for _, end in window_parts(start, start + n_tokens, self.cells.context.window)]
        if len(states) != len(ends):
            raise BackendError("The saved state is not of this model.")
        self.cells.make_consecutive(n_tokens)
        try:
            for part, end in zip(states, ends, strict=True):
                self._restore(part, end - self.length)
        except BackendError:
            self.rewind(start)
            raise

    def _restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        context, spare = self.cells.context, self.cells.spare_id()
        context.restore(spare, state)
        for path in self.ids:
            context.copy(spare, path, 0, -1)
        context.remove(spare)
        self.cells.restored(n_tokens)
        self.appended(n_tokens)


def _joined(states: Sequence[ctypes.Array[ctypes.c_uint8]]) -> ctypes.Array[ctypes.c_uint8]:
    """Several states as one, which `_divided` divides again."""
    data = b"".join([_PARTS, *(part for state in states for part in (_SIZE.pack(len(state)), bytes(state)))])
    return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)


def _divided(state: ctypes.Array[ctypes.c_uint8]) -> list[ctypes.Array[ctypes.c_uint8]]:
    """The states that one was joined from; itself if there was one alone."""
    data = memoryview(state).cast("B")
    if data[: len(_PARTS)] != _PARTS:
        return [state]
    states, at = [], len(_PARTS)
    while at + _SIZE.size <= len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        states.append((ctypes.c_uint8 * len(data[at : at + size])).from_buffer_copy(data[at : at + size]))
        at += size
    return states
