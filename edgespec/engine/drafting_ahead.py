"""Drafting ahead: draft steps while a pass waits for the disk.

Where the disk is slower than the arithmetic, a streamed pass waits for layers again and again. The drafter
uses these waits to go on below the tree that is being verified, so that the next one has a head start
(ShadowSpec, Saguaro and PEARL draft in the same time, on other processors). Its steps run in the thread of
the pass, while that would only wait. So they take no time from its arithmetic, except that a step may end
later than the wait. That does not matter as long as the disk goes on reading meanwhile, and the pass has
waits left in which it catches up. Both are looked at before each step, with times that were measured before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from edgespec.generation.result import PassRecord
from edgespec.models.llama.runtime.residency import Meanwhile
from edgespec.speculation.drafters.base import Drafter

_NEW = 0.3  # weight of the latest pass in a running mean
# Work counts for a little less than waiting. So if steps ever took more than what passes wait, there would be
# fewer of them in the next ones.
_WORKED = 0.9


class DraftingAhead:
    """Decides which waits are long enough, pass by pass.

    Args:
        clock: tells the time, in seconds.
        forced: whether waits are used: True for each of them, False for none, None by these times.

    Attributes:
        forced: the same; may be changed between passes.
        steps, seconds: of the steps during the latest pass.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, forced: bool | None = None) -> None:
        self.forced = forced
        self._clock = clock
        self.steps = 0
        self.seconds = 0.0
        self._drafter: Drafter | None = None
        self._spare_s: float | None = None  # that a pass waits, or would without these steps
        self._step_s: float | None = None

    def begin(self, drafter: Drafter, *, resting: bool = False) -> Meanwhile | None:
        """A pass of its own begins, over a tree that was just drafted.

        Args:
            resting: the drafter was not asked for this tree, which has only its root.

        Returns:
            What the pass may do while it waits.
        """
        self.steps, self.seconds = 0, 0.0
        self._drafter = drafter
        if self.forced is False or resting:
            return None
        if self.forced:
            return lambda read_ahead_s, left: self._take_step()
        return None if self._spare_s is None or self._step_s is None else self._use

    def end(self, record: PassRecord) -> None:
        """The pass has ended."""
        spare_s = record.wait_s + _WORKED * self.seconds
        self._spare_s = _mean(self._spare_s, spare_s)
        if record.draft_steps:
            self._step_s = _mean(self._step_s, record.draft_s / record.draft_steps)

    def _use(self, read_ahead_s: float, left: float) -> bool:
        """Take a draft step if there is time for it.

        Args:
            read_ahead_s: seconds for which the disk would go on reading.
            left: share of the pass's layers that are not computed yet.

        Returns:
            Whether one was taken.
        """
        assert self._step_s is not None
        assert self._spare_s is not None
        if self._step_s > min(read_ahead_s, self._spare_s * left, self._spare_s - self.seconds):
            return False
        return self._take_step()

    def _take_step(self) -> bool:
        """Take a draft step; False if there is none left."""
        assert self._drafter is not None
        start = self._clock()
        took_one = self._drafter.draft_ahead()
        seconds = self._clock() - start
        self.seconds += seconds
        if took_one:
            self.steps += 1
            self._step_s = _mean(self._step_s, seconds)
        return took_one


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _NEW * (value - before)
