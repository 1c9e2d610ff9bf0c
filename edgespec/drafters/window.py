"""The window of a long sequence that a drafter reads: its first tokens, attention's sinks, and its last ones.

Attention falls apart without the first tokens of a text, and hardly misses the middle (Xiao et al. 2023,
"Efficient Streaming Language Models with Attention Sinks"). So a draft step can cost the same behind any text
(TriForce, Sun et al. 2024). The drafter reads the two ends as one text without a gap, and never reads the
middle. Only drafts depend on that: the target reads everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SINKS = 64  # tokens at the beginning that are kept


@dataclass(frozen=True)
class DraftWindow:
    """The part of a sequence that a drafter reads.

    The middle of a long sequence is left out. It grows in steps of half the window, so that between two steps
    the drafter's cache only grows at its end.

    Attributes:
        last: most tokens at the end that are read; at least half as many are.
        first: tokens at the beginning that are read.
    """

    last: int
    first: int = SINKS

    @property
    def most(self) -> int:
        """Most tokens that are read of a sequence."""
        return self.first + self.last

    @property
    def _step(self) -> int:
        return max(self.last // 2, 1)

    def left_out(self, length: int) -> int:
        """The number of tokens behind the first ones that are left out of a sequence of `length` tokens."""
        return max(-(-(length - self.most) // self._step), 0) * self._step

    def steps_to(self, left_out: int) -> list[int]:
        """The numbers of tokens that were left out lately, the latest first, if `left_out` are now."""
        steps = [left_out, left_out - self._step, left_out - 2 * self._step]
        return [earlier for earlier in steps if earlier >= 0]

    def part(self, sequence: Sequence[int], left_out: int) -> list[int]:
        """A sequence without `left_out` tokens behind its first ones."""
        return [*sequence[: self.first], *sequence[self.first + left_out :]]

    def length_read(self, length: int) -> int:
        """The number of tokens that are read of a sequence of `length` tokens."""
        return length - self.left_out(length)


WHOLE = DraftWindow(1 << 62, first=0)
"""The window of a drafter that reads every sequence from its beginning to its end."""
