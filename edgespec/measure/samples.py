"""Repeated timings of the same work at several sizes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.costs.curves import Curve

ROUNDS = 7  # measurements of each size for a full profile


@dataclass
class TimingSamples:
    """Repeated timings by size, in seconds."""

    seconds: dict[int, list[float]] = field(default_factory=dict)

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        self.seconds.setdefault(size, []).append(seconds)

    def curve(self) -> Curve:
        """The curve through the medians."""
        return Curve.through((size, statistics.median(times)) for size, times in self.seconds.items())

    @property
    def spread(self) -> tuple[float, ...]:
        """Half the interquartile range relative to the median, for each size."""
        return tuple(_spread(self.seconds[size]) for size in sorted(self.seconds))


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle if middle > 0 else 0.0
