"""The owners of cells, in the order of the cells, for compaction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from edgespec.llama.cache.positions import Positions
from edgespec.llama.runtime.batch import TokenBatch


class CellHolder(Protocol):
    """A sequence that has cells; see BranchingCache, which is one."""

    length: int  # committed tokens
    ids: list[int]  # the sequence ids that hold the committed sequence
    positions: Positions  # of its tokens

    def numbered(self, batch: TokenBatch) -> TokenBatch: ...
    def close_path(self) -> None: ...
    def close_paths(self) -> None: ...


def window_parts(start: int, end: int, window: int) -> Iterator[tuple[int, int]]:
    """Positions start .. end - 1, in parts whose saved states hold all of their cells.

    llama.cpp leaves out of a state the cells of sliding-window layers that the position behind its last one
    does not see. Chunked windows begin at multiples of the window, so each part ends before one.

    Args:
        window: of these layers, in positions; 0 if there are none.
    """
    while window and (border := start - start % window + window) < end:
        yield start, border
        start = border
    yield start, end


@dataclass
class CellRange:
    """Consecutive tokens of one sequence, or of several that share their cells.

    Attributes:
        start, end: indexes start .. end - 1.
        holders: the sequences; each has these tokens in these cells.
    """

    start: int
    end: int
    holders: list[CellHolder]

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def positions(self) -> tuple[int, int]:
        """The position of its first token, and that behind its last."""
        positions = self.holders[0].positions
        return positions.at(self.start), positions.behind(self.end)

    @property
    def is_open(self) -> bool:
        """True if it ends within rows that have one position."""
        return self.holders[0].positions.floor(self.end) != self.end


class Segments:
    """All stretches of all sequences, ordered by cell.

    Attributes:
        n_cells: cells that sequences hold.
    """

    def __init__(self) -> None:
        self.n_cells = 0
        self._stretches: list[CellRange] = []
        self._in_place = 0  # leading stretches that fill the first cells without gaps

    def __iter__(self) -> Iterator[CellRange]:
        return iter(self._stretches)

    def add(self, holder: CellHolder, start: int, end: int) -> None:
        """Add positions of a sequence, whose cells come after those of all positions added before."""
        self.n_cells += end - start
        last = self._stretches[-1] if len(self._stretches) > self._in_place else None
        if last is not None and last.holders == [holder] and last.end == start:
            last.end = end
        elif end > start:
            self._stretches.append(CellRange(start, end, [holder]))

    def truncate(self, holder: CellHolder, length: int) -> None:
        """Drop positions `length` and later of a sequence; cells that others share stay theirs."""
        kept: list[CellRange] = []
        in_place = self._in_place
        for index, stretch in enumerate(self._stretches):
            if stretch.end <= length or holder not in stretch.holders:
                kept.append(stretch)
                continue
            others = [other for other in stretch.holders if other is not holder]
            if stretch.start < length:
                kept.append(CellRange(stretch.start, length, stretch.holders))
            if others:
                kept.append(CellRange(max(stretch.start, length), stretch.end, others))
            else:
                self.n_cells -= stretch.end - max(stretch.start, length)
                in_place = min(in_place, index)
        # A split of a stretch in place is in place too, but counting it is not worth the trouble.
        self._stretches, self._in_place = kept, in_place

    def share(self, source: CellHolder, holder: CellHolder, length: int) -> None:
        """Make a sequence, which has no positions yet, hold the first `length` positions of another."""
        shared: list[CellRange] = []
        in_place = self._in_place
        for index, stretch in enumerate(self._stretches):
            if stretch.start >= length or source not in stretch.holders:
                shared.append(stretch)
                continue
            shared.append(CellRange(stretch.start, min(stretch.end, length), [*stretch.holders, holder]))
            if stretch.end > length:
                in_place = min(in_place, index)
                shared.append(CellRange(length, stretch.end, stretch.holders))
        self._stretches, self._in_place = shared, in_place

    def parts_to_move(self, size: int) -> Iterator[list[CellRange]]:
        """The stretches that are not in place, as parts of at most `size` cells, in order.

        A part may be larger: rows that have one position are moved together, with all that lies between them
        if other sequences were decoded meanwhile.

        Within a part, a sequence's adjacent stretches are joined. That changes the order between sequences,
        which does not matter, and keeps the order within each. Once all parts have been taken, everything is
        in place.
        """
        first = self._first_to_move()
        moved, rest = self._stretches[:first], self._stretches[first:]
        part: list[CellRange] = []
        room, last = size, 0  # stretches before the last one belong to the part as a whole
        for number, stretch in enumerate(rest):
            start = stretch.start
            while start < stretch.end:
                end = stretch.end
                if number >= last:
                    end = min(end, stretch.holders[0].positions.ceiling(start + max(room, 1)))
                piece = CellRange(start, end, stretch.holders)
                if piece.is_open:
                    last = max(last, _continuation(rest, number, piece))
                _join(part, piece)
                room -= len(piece)
                start = end
                if room <= 0 and number >= last:
                    yield part
                    moved += part
                    part, room = [], size
        if part:
            yield part
            moved += part
        self._stretches = _joined(moved)
        self._in_place = len(self._stretches)

    def _first_to_move(self) -> int:
        """The number of leading stretches that may stay: all in place, but for rows whose others may not."""
        first, at = self._in_place, len(self._stretches)
        while at > first:
            at -= 1
            stretch = self._stretches[at]
            if stretch.holders[0].positions.floor(stretch.start) != stretch.start:
                before = (n for n in range(at) if _continues(self._stretches[n], stretch))
                first = min(first, next(before, at))
        return first

    def clear(self) -> None:
        """Forget everything."""
        self._stretches, self._in_place, self.n_cells = [], 0, 0


def _continues(stretch: CellRange, following: CellRange) -> bool:
    """True if the second stretch has the next tokens of the first one's sequences."""
    return following.start == stretch.end and following.holders == stretch.holders


def _continuation(stretches: list[CellRange], number: int, piece: CellRange) -> int:
    """The number of the later stretch that continues a piece; that of the piece if there is none yet."""
    later = range(number + 1, len(stretches))
    return next((n for n in later if _continues(piece, stretches[n])), number)


def _join(part: list[CellRange], stretch: CellRange) -> None:
    for known in part:
        if _continues(known, stretch):
            known.end = stretch.end
            return
    part.append(stretch)


def _joined(stretches: list[CellRange]) -> list[CellRange]:
    """Join neighbouring stretches of one sequence."""
    joined: list[CellRange] = []
    for stretch in stretches:
        last = joined[-1] if joined else None
        if last is not None and _continues(last, stretch):
            last.end = stretch.end
        else:
            joined.append(stretch)
    return joined
