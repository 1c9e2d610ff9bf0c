"""Timing draft steps of a drafter that has a model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from edgespec.base.progress import Progress
from edgespec.costs.curves import Curve
from edgespec.machine.contention import ContentionWatch
from edgespec.measure.passes import ROUNDS, TimingSamples
from edgespec.profiles.store import DraftProfile
from edgespec.speculation.drafters.base import Drafter

_WIDTHS = (1, 2, 4, 8, 16, 32)


@runtime_checkable
class _TakesSteps(Protocol):
    """A drafter whose steps take time."""

    def step_seconds(self, rows: int) -> float: ...


def quick_steps(drafter: Drafter, width: int, threads: int) -> DraftProfile | None:
    """Measure a draft step of one row and one of most rows; None where steps take next to no time.

    Args:
        threads: that the drafter computes with.
    """
    if not isinstance(drafter, _TakesSteps):
        return None
    timed, watch = TimingSamples(), ContentionWatch(threads)
    for _ in range(2):
        for rows in (1, width):
            timed.add(rows, drafter.step_seconds(rows))
    best = {rows: min(times) for rows, times in timed.seconds.items()}
    return DraftProfile(Curve.through(best.items()), quick=True, busy=watch.pressure)


def measure_steps(drafter: Drafter, width: int, on_progress: Progress) -> DraftProfile | None:
    """Measure the curve of draft steps; None where they take next to no time."""
    if not isinstance(drafter, _TakesSteps):
        return None
    timed = TimingSamples()
    for turn in range(ROUNDS):
        for rows in (w for w in _WIDTHS if w <= width):
            timed.add(rows, drafter.step_seconds(rows))
        on_progress("Measuring draft steps", (turn + 1) / ROUNDS)
    return DraftProfile(timed.curve())
