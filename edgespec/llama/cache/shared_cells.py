"""The cells of one context, shared by many sequences.

llama.cpp distinguishes sequences, and the branches of each, by sequence ids: a row attends to the cells that
have its first id. So sequences can be decoded in one pass, and sequences that begin alike can share the cells
of their beginnings.

With `ordered`, new rows always take cells after all earlier ones, so that every query sums its cells in the
same order as plain decoding, with the same rounding; the cells of other sequences in between are masked and
change nothing. Cells that are no longer needed are not freed, because later rows would fill them out of
order, but parked under a graveyard id that no query uses. When the tail is full, they are freed, and the
sequences are moved to the front part by part, bit for bit. Only one part is copied at a time, so the
sequences never take their memory twice.

Where layers have sliding windows, llama.cpp reuses any cell with a single id that the end of its sequence
does not see. A sequence that is rewound, or that shares the beginning, would lack that cell. So all cells in
use have the keeper's id as well; those of branches only once a branch has outgrown a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgespec.llama.cache.segments import CellHolder, CellRange, Segments, window_parts
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, NoRoomInCache

PART = 128  # cells that are moved at a time


class SharedCells:
    """Gives sequences their sequence ids, decodes rows of several sequences at once, and makes room.

    Attributes:
        context: whose cells these are.
        ordered: whether rows take cells in the order of decoding.
        holders: the sequences that have cells, or may have them.
        compactions: how often the sequences were moved to the front.
        padding_id: the sequence of rows that only fill up a pass; for ordered caches.
    """

    def __init__(self, context: Context, *, ordered: bool) -> None:
        self.context = context
        self.ordered = ordered
        self.holders: list[CellHolder] = []
        self.compactions = 0
        # Ordered caches reserve two ids: for padding, and for rejected cells.
        self.n_ids = context.n_sequences - (2 if ordered else 0)
        self.padding_id = context.n_sequences - 2
        self._graveyard_id = context.n_sequences - 1
        self._keeper_id = context.keeper_id
        self._free_ids = list(range(self.n_ids))[::-1]  # the lowest is taken first
        self._segments = Segments()
        self._tail = 0  # no cell from this one on is in use
        self._outgrown: set[CellHolder] = set()  # those whose branches have outgrown a window

    @property
    def shared(self) -> bool:
        """True if there are several sequences."""
        return len(self.holders) > 1

    @property
    def n_free_ids(self) -> int:
        """Sequence ids that no sequence has."""
        return len(self._free_ids)

    @property
    def n_live(self) -> int:
        """Cells that sequences hold; shared ones count once. Known if ordered, or for one sequence."""
        if self.ordered:
            return self._segments.n_cells
        return sum(holder.length for holder in self.holders)

    def add(self, holder: CellHolder) -> int:
        """Add a sequence; returns its first sequence id.

        Raises:
            ValueError: there are as many sequences as sequence ids.
        """
        if not self._free_ids:
            for other in self.holders:
                other.close_paths()
        if not self._free_ids:
            raise ValueError(f"all {self.n_ids} sequence ids are taken by texts")
        if len(self.holders) == 1 and self.ordered:
            # While this was the only sequence, what it forgot was freed and not parked.
            self.compact()
        self.holders.append(holder)
        return self._free_ids.pop()

    def remove(self, holder: CellHolder) -> None:
        """Take back the ids of a sequence that holds no cells any more."""
        self.holders.remove(holder)
        self._outgrown.discard(holder)
        self.give_back(holder.ids)

    def drop(self, holder: CellHolder) -> None:
        """Drop a sequence whose contents are unknown until `recover` has run; call that next."""
        self.holders.remove(holder)
        self._outgrown.discard(holder)
        if self.ordered:
            self._segments.truncate(holder, 0)
            self._tail = self.context.n_cells  # its freed cells may lie before kept ones

    def take_id(self) -> int:
        """A sequence id for another branch of a sequence.

        Raises:
            IndexError: there is none left.
        """
        return self._free_ids.pop()

    def give_back(self, ids: Sequence[int]) -> None:
        """Take back ids that no cell has any more."""
        self._free_ids.extend(reversed(ids))

    def decode(self, parts: Sequence[tuple[CellHolder, TokenBatch]], rows: int) -> None:
        """Decode rows of several sequences in one pass, padded to `rows`.

        Args:
            parts: sequences, and their rows in ids 0 .. paths - 1 of the sequence itself, which must be open.

        Raises:
            NoRoomInCache: too few free cells.
        """
        n_rows = max(sum(len(batch) for _, batch in parts), rows if self.ordered else 0)
        self.reserve(n_rows)
        batch = TokenBatch.joined([holder.numbered(batch) for holder, batch in parts])
        padded = batch.padded(n_rows, self.padding_id)
        self.context.decode(padded)
        self._tail = min(self._tail + n_rows, self.context.n_cells)
        if len(padded) > len(batch):
            self.park(self.padding_id, 0)
            self.context.remove(self.padding_id)

    def reserve(self, n_rows: int) -> None:
        """Prepare for decoding so many rows, in one pass or in several.

        Raises:
            NoRoomInCache: too few free cells.
        """
        # Unordered caches reuse freed cells anywhere, so only llama.cpp knows when they are full.
        if self.ordered and self._tail + n_rows > self.context.n_cells:
            self.compact()
            if self._tail + n_rows > self.context.n_cells:
                raise NoRoomInCache(self.context.n_cells)

    def park(self, sequence: int, start: int) -> None:
        """Keep the cells of a sequence from position `start` on from being freed."""
        self.context.copy(sequence, self._graveyard_id, start, -1)
        self._keep(self._graveyard_id, start, -1)

    def committed(self, holder: CellHolder, start: int, end: int) -> None:
        """Note that the newest cells hold these positions of a sequence.

        Rows of one pass must be committed in the order in which they were decoded.
        """
        self._keep(holder.ids[0], holder.positions.at(start), holder.positions.behind(end))
        if self.ordered:
            self._segments.add(holder, start, end)

    def truncated(self, holder: CellHolder, length: int) -> None:
        """Note that a sequence is now at most this long."""
        self.removed(holder.positions.at(length))
        if self.ordered:
            self._segments.truncate(holder, length)

    def removed(self, start: int) -> None:
        """Free the cells at positions `start` and later that no sequence has any more."""
        if self._keeper_id is None:
            return
        self.context.remove(self._keeper_id, start)
        for holder in self.holders:
            for path in holder.ids if holder in self._outgrown else holder.ids[:1]:
                self._keep(path, start, -1)
        if self.ordered:
            self._keep(self._graveyard_id, start, -1)

    def keep_branches(self, holder: CellHolder, batch: TokenBatch) -> None:
        """Keep the cells of branches that were decoded, once one has outgrown a sliding window.

        Rows of later decodes would take the first cells of such a branch, before it is committed.

        Args:
            batch: the rows, in ids 0 .. paths - 1 of the sequence.
        """
        if self._keeper_id is None or self.ordered:  # an ordered cache has a single decode for all branches
            return
        start = holder.positions.at(holder.length)
        last = start + int(batch.positions.max()) - holder.length
        window = self.context.window
        if start // window == (last + 1) // window:  # chunked windows begin at multiples
            return
        for path in np.unique(batch.sequence_ids).tolist():
            self._keep(holder.ids[path], start, -1)
        self._outgrown.add(holder)

    def branches_dropped(self, holder: CellHolder, start: int, *, all_of_them: bool) -> None:
        """Note that a sequence has dropped branches from position `start` on."""
        if holder in self._outgrown:
            if all_of_them:
                self._outgrown.remove(holder)
            self.removed(start)

    def _keep(self, sequence: int, start: int, end: int) -> None:
        """Keep cells of a sequence from being reused while it has them."""
        if self._keeper_id is not None:
            self.context.copy(sequence, self._keeper_id, start, end)

    def inherited(self, holder: CellHolder, source: CellHolder, length: int) -> None:
        """Note that a sequence now shares the first `length` positions of another."""
        if self.ordered:
            self._segments.share(source, holder, length)

    def recover(self) -> None:
        """Drop everything but the committed sequences, wherever the last call was interrupted.

        Calls reduce a sequence's `length` before they remove cells, and increase it only after they have
        added some. So the first `length` tokens are in its first id whatever happened; nothing else is
        certain.
        """
        self._outgrown.clear()
        homes = {holder.ids[0]: holder for holder in self.holders}
        for sequence in range(self.context.n_sequences):
            if sequence not in homes and not (self.ordered and sequence == self._graveyard_id):
                self.context.remove(sequence)
        for home, holder in homes.items():
            holder.length = holder.positions.floor(holder.length)
            self.context.remove(home, holder.positions.at(holder.length))
            if self.ordered:
                self._segments.truncate(holder, holder.length)
            holder.ids = [home]
        self.removed(0)
        self._free_ids = [n for n in range(self.n_ids) if n not in homes][::-1]
        if self.shared and self.ordered:
            self._tail = self.context.n_cells  # some freed cells may lie before kept ones

    def compact(self) -> None:
        """Move the sequences' cells to the front, in order, and free all others; for ordered caches.

        If an exception interrupts this, the sequences are forgotten.
        """
        if self._tail == self._segments.n_cells:
            return
        lengths = [(holder, holder.length) for holder in self.holders]
        for holder in self.holders:
            holder.length = 0  # until all of it is in place again
        try:
            homes = {holder.ids[0] for holder in self.holders}
            for sequence in range(self.context.n_sequences):
                if sequence not in homes:
                    self.context.remove(sequence)
            self.removed(0)
            for part in self._segments.parts_to_move(PART):
                self._move_to_front(part)
            for holder, length in lengths:
                for path in holder.ids[1:]:
                    self.context.copy(holder.ids[0], path, 0, holder.positions.behind(length))
        except BaseException:
            self.clear()
            raise
        self._tail = self._segments.n_cells
        for holder, length in lengths:
            holder.length = length
        self.compactions += 1

    def _move_to_front(self, part: Sequence[CellRange]) -> None:
        """Move stretches of sequences to the first free cells; everything before them must be in place.

        All cells between what is in place and what follows the part are then free, and enough for it.
        llama.cpp fills the first free cells in order.
        """
        spare, window = self.padding_id, self.context.window
        part = [
            replace(stretch, start=start, end=end)
            for stretch in part
            for start, end in window_parts(stretch.start, stretch.end, window)
        ]
        states = []
        for stretch in part:
            self.context.copy(stretch.holders[0].ids[0], spare, *stretch.positions)
            states.append(self.context.save(spare))
            self.context.remove(spare)
        for stretch in part:
            for holder in stretch.holders:
                self.context.remove(holder.ids[0], *stretch.positions)
        self.removed(min(stretch.positions[0] for stretch in part))
        for stretch, state in zip(part, states, strict=True):
            self.context.restore(spare, state)
            for holder in stretch.holders:
                self.context.copy(spare, holder.ids[0], *stretch.positions)
            self._keep(spare, *stretch.positions)
            self.context.remove(spare)

    def make_consecutive(self, n_tokens: int) -> None:
        """Prepare for restoring a state of `n_tokens` tokens behind everything else.

        Raises:
            NoRoomInCache: too few free cells.
        """
        if self.ordered:
            self.compact()
        if self.n_live + n_tokens > self.context.n_cells:
            raise NoRoomInCache(self.context.n_cells)

    def restored(self, n_tokens: int) -> None:
        """Note that a state has taken the first free cells."""
        self._tail = min(self._tail + n_tokens, self.context.n_cells)

    def clear(self) -> None:
        """Forget all sequences."""
        for holder in self.holders:
            holder.length = 0
        self._outgrown.clear()
        self._segments.clear()
        self.context.clear()
        self._tail = 0

    def spare_id(self) -> int:
        """An id that no cell has: that of padding, or one that a sequence gives up."""
        if self.ordered:
            return self.padding_id
        if not self._free_ids:
            next(holder for holder in self.holders if len(holder.ids) > 1).close_path()
        return self._free_ids[-1]
