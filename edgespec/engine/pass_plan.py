"""The sequences of the next pass, and the rows of each.

A pass over streamed weights takes nearly as long for one row as for dozens, so its rows are filled with what
is certain to be wanted: the next token of every sequence that is being answered, and then tokens of prompts
that are still to be read (chunked prefill, Agrawal et al. 2023), so an answer waits for prompts no longer
than a full pass takes. The oldest prompt gets at least half of these rows, so that none starves; the others
get the rest, the shortest first, so that a short one does not wait for the end of a long one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST = 2.0  # times as long as without prompts: a pass for sequences that are being answered
_MAX_ROWS = 1 << 20


@dataclass(frozen=True)
class PassLimits:
    sequences: int  # most sequences that are extended, each by a row of logits
    rows: int  # most rows


@dataclass(frozen=True)
class PassPlan:
    """The contents of the next pass."""

    extended: int  # how many sequences are extended, the oldest first
    # for each prompt that is being read, the oldest first, how many of its tokens are read
    chunks: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the pass, without padding."""
        return self.extended + sum(self.chunks)


def plan_pass(extendable: int, unread: Sequence[int], limits: PassLimits) -> PassPlan:
    """The next pass.

    Args:
        extendable: sequences whose prompts have been read.
        unread: for each prompt that is being read, the oldest first, how many tokens are left.
    """
    extended = min(extendable, limits.sequences)
    room = limits.rows - extended
    chunks = [0] * len(unread)

    def give(prompt: int, most: int) -> None:
        nonlocal room
        more = min(unread[prompt] - chunks[prompt], most)
        chunks[prompt] += more
        room -= more

    if unread:
        give(0, (room + 1) // 2)
        for prompt in sorted(range(1, len(unread)), key=unread.__getitem__):
            give(prompt, room)
        give(0, room)
    return PassPlan(extended, tuple(chunks))


class PrefillLimiter:
    """Limits the rows of a pass that reads prompts beside sequences that are being answered.

    A pass over streamed weights takes as long for few rows as for many, up to a number that depends on the
    disk and the processor. So the number is found while answering: as many as make a pass twice as long.

    Args:
        least: rows that any pass may have.

    Attributes:
        rows: as many as the next pass may have.
    """

    def __init__(self, least: int) -> None:
        self.rows = self._least = least
        self._shortest_s = math.inf

    def passed(self, rows: int, seconds: float) -> None:
        """Learn from a pass that extended sequences."""
        if rows <= self._least:
            # The shortest pass is the least disturbed by other programs; passes slow down only gradually.
            self._shortest_s = min(seconds, 1.05 * self._shortest_s)
        if rows >= self._least and seconds > 0 and self._shortest_s < math.inf:
            wanted = self.rows * _LONGEST * self._shortest_s / seconds
            self.rows = round(min(max(wanted, self._least), _LONGEST * max(rows, self.rows), _MAX_ROWS))


@dataclass(frozen=True)
class CellBudget:
    """The number of sequences that the cells of the cache can hold.

    Every sequence in flight needs room to grow, or the cells would soon be full, and sequences would be moved
    to disk and back.
    """

    cells: int  # cells of the cache
    spare: int  # cells that must stay free for the rows of the next pass
    # cells that are kept free for each sequence when another one is let in, unless it will end before it has
    # taken them.
    growth: int = 48

    def admits(self, held: int, wanted: int, left: Sequence[int]) -> bool:
        """True if another sequence may begin.

        Args:
            held: cells that are in use.
            wanted: cells that it needs at once.
            left: tokens that each sequence may still get: the new one, and those that have begun. The first
                one is always admitted.
        """
        if len(left) == 1:
            return True
        return held + wanted + self.spare + sum(min(self.growth, n) for n in left) <= self.cells

    def overflows(self, held: int) -> bool:
        """True if the next pass may not find enough free cells."""
        return held + self.spare > self.cells
