"""Showing passes to the drafter: always while it drafts, and as often as it costs nothing while it rests.

What a drafter sees in passes makes its next trees better. Where drafting does not pay, though, a look takes
time that plain decoding does not: with a vocabulary of 49,152 tokens 0.2 ms, which is nothing beside a pass
of a large model, and 3 % of one that takes 7 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.tree import FloatArray, TokenTree

_RESTING_SHARE = 0.002  # of the time of passes, that looks at them may take while the drafter rests


class ObservationPolicy:
    """Decides which passes a drafter is shown.

    Args:
        clock: tells the time, in seconds.

    Attributes:
        forced: whether a drafter that rests is shown passes: True for all of them, False for none, None as
            far as it costs nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.forced: bool | None = None
        self._clock = clock
        self._saved_s = 0.0  # that looks may take while the drafter rests; negative if they took more

    def show(
        self,
        drafter: Drafter,
        sequence: Sequence[int],
        tree: TokenTree,
        logits: FloatArray,
        resting_pass_s: float | None = None,
    ) -> float:
        """Show a pass to a drafter, or leave it out.

        Args:
            sequence: the sequence that the pass extended.
            logits: (nodes, n_vocab) the target's.
            resting_pass_s: if the drafter was asked for no tree of the pass, its seconds divided by the
                sequences that shared it; None if it was asked.

        Returns:
            Seconds that the drafter took.
        """
        if resting_pass_s is not None:
            self._saved_s = min(self._saved_s + _RESTING_SHARE * resting_pass_s, resting_pass_s)
            looks = self._saved_s >= 0 if self.forced is None else self.forced
            if not looks:
                return 0.0
        start = self._clock()
        drafter.observe(sequence, tree, logits)
        seconds = self._clock() - start
        if resting_pass_s is not None:
            # A single look counts as a pass at most: one that was disturbed must not be the last.
            self._saved_s -= min(seconds, resting_pass_s)
        return seconds
