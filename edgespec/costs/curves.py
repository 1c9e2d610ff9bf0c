"""Time curves: the seconds a pass takes as a function of its rows, from measurements at a few sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Curve:
    """Straight lines between measured points. Never falls; beyond the last point the last slope continues."""

    rows: tuple[int, ...]  # the measured sizes, in increasing order
    seconds: tuple[float, ...]  # how long each took

    @classmethod
    def through(cls, points: Iterable[tuple[int, float]]) -> Curve:
        """The curve through (rows, seconds) points. Where they fall, which is noise, the curve stays level.

        Raises:
            ValueError: there are no points, or one has no rows or no finite time.
        """
        known = dict(sorted(points))
        if not known or min(known) < 1 or not all(0 <= s < float("inf") for s in known.values()):
            raise ValueError("a curve needs points of at least one row and finite seconds")
        return cls(tuple(known), tuple(accumulate(known.values(), max)))

    def at(self, rows: float) -> float:
        """Seconds at this many rows."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        left = self._left_of(rows)
        return self.seconds[left] + (rows - self.rows[left]) * self._steepness(left)

    def slope(self, rows: float) -> float:
        """Seconds that one more row adds at this size."""
        return self._steepness(self._left_of(rows))

    def knee(self, tolerance: float = 0.05) -> int:
        """The most rows that take no longer than one row, within a relative `tolerance`."""
        limit = self.seconds[0] * (1 + tolerance)
        within = bisect_right(self.seconds, limit) - 1
        if within == len(self.rows) - 1:
            return self.rows[-1]
        steep = self._steepness(within)
        return self.rows[within] + int((limit - self.seconds[within]) / steep)

    def moved(self, rows: float, seconds: float, rate: float) -> Curve:
        """The curve moved a fraction `rate` of the way towards an observed point, neighbours included.

        Points that it passes move along: fewer rows take no longer than these, and more rows no less time.
        """
        off = rate * (seconds - self.at(rows))
        if rows <= self.rows[0] or len(self.rows) == 1:
            shares = {0: 1.0}
        else:
            left = self._left_of(rows)
            part = min((rows - self.rows[left]) / (self.rows[left + 1] - self.rows[left]), 1.0)
            norm = (1 - part) ** 2 + part**2
            shares = {left: (1 - part) / norm, left + 1: part / norm}
        moved = [max(s + off * shares.get(i, 0.0), 0.0) for i, s in enumerate(self.seconds)]
        if off < 0:
            return Curve(self.rows, tuple(accumulate(reversed(moved), min))[::-1])
        return Curve(self.rows, tuple(accumulate(moved, max)))

    def reaching(self, rows: int) -> Curve:
        """The curve with a point at this size, extrapolated if nothing so large was measured.

        Observations of such sizes then move that point, and not the last measured one.
        """
        if rows <= self.rows[-1]:
            return self
        return Curve((*self.rows, rows), (*self.seconds, self.at(rows)))

    def scaled(self, factor: float) -> Curve:
        """The curve with every time multiplied by `factor`."""
        return Curve(self.rows, tuple(s * factor for s in self.seconds))

    def floored(self, seconds: float) -> Curve:
        """The curve with every time at least `seconds`."""
        corner = self._last_within(seconds)
        rows = {*self.rows, corner, corner + 1, 2 * max(corner, self.rows[-1])}
        return Curve.through((row, max(self.at(row), seconds)) for row in rows)

    def _last_within(self, seconds: float) -> int:
        """The most rows that take no longer than `seconds`; the first measured size if all do, or none."""
        left = bisect_right(self.seconds, seconds) - 1
        steep = self._steepness(left)
        if left < 0 or steep <= 0:
            return self.rows[0]
        return self.rows[left] + min(int((seconds - self.seconds[left]) / steep), 1 << 20)

    def _left_of(self, rows: float) -> int:
        """The index of the point where the line segment over `rows` begins."""
        return max(min(bisect_right(self.rows, rows) - 1, len(self.rows) - 2), 0)

    def _steepness(self, left: int) -> float:
        if len(self.rows) == 1:
            return 0.0
        left = min(left, len(self.rows) - 2)
        return (self.seconds[left + 1] - self.seconds[left]) / (self.rows[left + 1] - self.rows[left])
