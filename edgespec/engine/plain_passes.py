"""The time of a pass without drafts, by the passes of the last minutes: what speed-ups are compared with.

Figures that were measured at another time say little here. Another program may keep the processor or the disk
busy now, and then plain decoding would be slower as well.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from edgespec.costs.curves import Curve
from edgespec.generation.result import PassRecord

_RECENT_S = 300.0
_MAX_PASSES = 32  # of each kind, the latest
_ENOUGH = 3  # plain passes of an answer


class PlainPasses:
    """The seconds of a plain pass, from recent passes of one sequence.

    Args:
        curve: seconds of passes by rows, measured at any time: only the ratios of its points are used. None
            if there is none.
        read_share: the share of its reads that a pass would have without the drafter, whose memory would hold
            weights.
        clock: tells the time, in seconds.
    """

    def __init__(
        self,
        curve: Curve | None = None,
        read_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._curve = curve
        self._read_share = read_share
        self._clock = clock
        self._plain: deque[tuple[float, float]] = deque(maxlen=_MAX_PASSES)
        self._derived: deque[tuple[float, float]] = deque(maxlen=_MAX_PASSES)

    def add(self, record: PassRecord) -> None:
        """Learn from a pass over one sequence, which read nothing of prompts."""
        seconds, now = self._without_drafts(record), self._clock()
        if record.nodes == 1:
            self._plain.append((now, seconds))
        elif self._curve is not None and (tree_s := self._curve.at(record.nodes)) > 0:
            self._derived.append((now, seconds * self._curve.at(1) / tree_s))

    @property
    def seconds(self) -> float:
        """The median of recent plain passes, or else what passes with trees say; 0 if there were none."""
        return self._median(self._plain) or self._median(self._derived)

    def of(self, passes: Sequence[PassRecord]) -> float:
        """The median of an answer's own plain passes if it has enough, or else that of recent ones."""
        own = [
            self._without_drafts(record) for record in passes[1:] if record.nodes == 1 and not record.shared
        ]
        return statistics.median(own) if len(own) >= _ENOUGH else self.seconds

    def _median(self, passes: deque[tuple[float, float]]) -> float:
        since = self._clock() - _RECENT_S
        recent = [seconds for at, seconds in passes if at >= since]
        return statistics.median(recent) if recent else 0.0

    def _without_drafts(self, record: PassRecord) -> float:
        """Seconds of a pass if nothing had been drafted for it."""
        # What was read while the drafter worked would have to be waited for without a drafter.
        seconds = record.target_s + record.hidden_draft_s
        return max(seconds * self._read_share, record.target_s - record.wait_s)
