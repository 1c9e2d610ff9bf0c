"""Running estimates of what nodes and draft steps cost, corrected by every pass while decoding.

This is separate from `costs.pass_time` on purpose. A prediction there is assembled from parts that were
measured beforehand; here only whole rounds are timed, and what matters is how that time changes with the
tree.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter

from edgespec.costs.pass_time import RoundCosts, even_draft_seconds, read_seconds_within, streamed_curve
from edgespec.generation.result import PassRecord

_DISTURBED, _WRONG = 1.5, 3.0  # times the seconds that were expected: another program disturbed a pass if it
# takes longer than the first, and the expectation was wrong if longer than the second
_CORRECTION = 0.2  # how far a pass or a draft moves an estimate, in the long run
_PRIOR_PASSES = 1  # weight of what was measured beforehand, in passes of a size
_FADE = 0.98  # weight of the past in the line, per pass
_ALL_HIDDEN = 0.9  # share of a draft from which it counts as hidden as a whole
_MORE = 1.2  # how much more than that is believed to be hidden


class OnlineCostCurve:
    """Seconds of passes by nodes as they were measured, moved by every pass.

    The arithmetic and the reading of streamed weights are learned apart: a pass that waited for the disk says
    how long reading takes, and any other one that reading takes no longer than the pass.

    Args:
        costs: what was measured beforehand.
        most: nodes of a tree.
    """

    def __init__(self, costs: RoundCosts, most: int) -> None:
        self._compute = costs.compute.reaching(most)
        self._read_s, self._overlap = costs.read_s, costs.overlap
        self._curve = streamed_curve(self._compute, self._read_s, self._overlap)
        self._most = most
        self._passes: Counter[int] = Counter()  # by the number of bits of their nodes
        self._is_slow = False  # the latest one was

    @property
    def free(self) -> int:
        """Nodes that cost nothing."""
        return self._curve.knee()

    def expected(self, nodes: int) -> float:
        """Seconds that a pass of so many nodes takes."""
        return self._curve.at(nodes)

    def nodes_within(self, nodes: int, more_s: float) -> int:
        """The maximum nodes of a pass that takes no more than these seconds longer than one of `nodes`."""
        longest = self._curve.at(nodes) + more_s
        return nodes - 1 + bisect_right(range(nodes, self._most + 1), longest, key=self._curve.at)

    def undisturbed(self, nodes: int, seconds: float) -> float:
        """Seconds of the latest pass with drafts, without what another program took if it alone was slow."""
        expected, was_slow = self._curve.at(nodes), self._is_slow
        self._is_slow = seconds > _DISTURBED * expected
        return seconds if was_slow or seconds > _WRONG * expected else min(seconds, _DISTURBED * expected)

    @property
    def slope(self) -> float | None:
        """Seconds that each node beyond the free ones adds."""
        free = self.free
        if free >= self._most:
            return 0.0
        # Over the whole rest of the curve: between two points it may be level by chance.
        return (self._curve.at(self._most) - self._curve.at(free)) / (self._most - free)

    def add(self, nodes: int, seconds: float, wait_s: float = 0.0) -> None:
        """Learn from a pass.

        Args:
            wait_s: the part of its seconds in which it waited for weights.
        """
        # Streamed answers have few passes, and the first shows whether the disk hides what so many rows cost.
        size = nodes.bit_length()
        rate = max(1 / (_PRIOR_PASSES + self._passes[size] + 1), _CORRECTION)
        self._passes[size] += 1
        # A pass that another program disturbed says little.
        seconds = min(seconds, 2 * self._curve.at(nodes))
        busy_s = max(seconds - wait_s, 0.0) if self._read_s else seconds
        self._compute = self._compute.moved(nodes, busy_s, rate)
        read_s = read_seconds_within(seconds, self._compute.at(nodes), self._overlap)
        if self._read_s and read_s is not None:
            self._read_s += rate * (read_s - self._read_s)
        self._read_s = min(self._read_s, seconds)
        self._curve = streamed_curve(self._compute, self._read_s, self._overlap)


class DecayedLinearFit:
    """A straight line of seconds over nodes, where nothing was measured; the past fades."""

    free = 1

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def slope(self) -> float | None:
        """Seconds a node adds; None while all rounds had about as many nodes."""
        spread = self._n * self._xx - self._x * self._x
        if spread < self._n:
            return None
        return max((self._n * self._xy - self._x * self._y) / spread, 0.0)

    def expected(self, nodes: int) -> None:
        """Return nothing: a line says too little of one pass."""

    def nodes_within(self, nodes: int, more_s: float) -> int:
        """Return no limit: a line says too little of passes that are a little longer."""
        return sys.maxsize

    def undisturbed(self, nodes: int, seconds: float) -> float:
        """Return the seconds: a line says too little of what is usual."""
        return seconds

    def add(self, nodes: int, seconds: float, wait_s: float = 0.0) -> None:
        """Learn from a round."""
        self._n = _FADE * self._n + 1
        self._x = _FADE * self._x + nodes
        self._y = _FADE * self._y + seconds
        self._xx = _FADE * self._xx + nodes * nodes
        self._xy = _FADE * self._xy + nodes * seconds


class ReadAhead:
    """The time that the disk reads ahead for the pass while the drafter works.

    What is read then need not be waited for in the pass, so drafting costs only what it takes beyond that.

    Attributes:
        seconds: of drafting that cost nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, record: PassRecord) -> None:
        """Learn from a round with draft steps."""
        hidden = record.hidden_draft_s
        if hidden > _ALL_HIDDEN * record.draft_s:
            # The draft ended before the disk did, so that more might have been hidden.
            self.seconds = max(self.seconds, _MORE * hidden)
        else:
            self.seconds += _CORRECTION * (hidden - self.seconds)


class StepCosts:
    """The time of draft steps: a fixed part for the first node, and a part for each further node.

    Attributes:
        step_s, row_s: seconds; 0 while nothing is known.
    """

    def __init__(self, step_s: float | None, row_s: float) -> None:
        self._first, self._further = step_s, row_s
        self._slower = 1.0  # factor over what was measured beforehand

    @property
    def step_s(self) -> float:
        return self._slower * (self._first or 0.0)

    @property
    def row_s(self) -> float:
        return self._slower * self._further

    def add(self, record: PassRecord) -> None:
        """Learn from a draft. Estimates fall at once and rise slowly: a draft may have read new tokens."""
        if self._first is None:
            self._first = record.draft_s / record.draft_steps
        elif not record.draft_text_s and (expected := self._expected(record)) > 0:
            self._slower *= min(record.draft_s / expected, 1.05)

    def recurring(self, record: PassRecord) -> float:
        """Seconds of a draft without those on tokens that were new to the drafter, as where an answer begins,
        and without what another program took.
        """
        expected = self._expected(record)
        if record.draft_text_s:
            return min(record.draft_s, expected or record.draft_s - record.draft_text_s + self.step_s)
        return expected if record.draft_steps and record.draft_s > 2 * expected else record.draft_s

    def _expected(self, record: PassRecord) -> float:
        return even_draft_seconds(self.step_s, self.row_s, record.draft_steps, record.draft_rows)
