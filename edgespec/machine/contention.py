"""Competition of other programs for the processor during a measurement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from edgespec.machine.cores import allowed_numbers

DISTURBED = 0.1  # of the time that a measurement's threads could have run


@dataclass(frozen=True)
class ProcessorUse:
    """Processor time used so far."""

    at: float  # seconds on a monotonic clock
    busy_s: float  # total seconds that the cores of this process were busy, or taken by a hypervisor
    own_s: float  # the part of them that this process and its children that have ended used


def read_load() -> ProcessorUse:
    """Processor time used up to now; none by others where the system does not tell, as Android does not."""
    own = psutil.Process().cpu_times()
    own_s = own.user + own.system + own.children_user + own.children_system
    try:
        per_core = psutil.cpu_times(percpu=True)
    except OSError:
        return ProcessorUse(time.monotonic(), own_s, own_s)
    allowed = [core for core in allowed_numbers() or range(len(per_core)) if core < len(per_core)]
    busy = 0.0
    for core in allowed:
        times = per_core[core]._asdict()
        waiting = times.get("idle", 0.0) + times.get("iowait", 0.0)
        counted_twice = times.get("guest", 0.0) + times.get("guest_nice", 0.0)  # included in user and nice
        busy += sum(times.values()) - waiting - counted_twice
    return ProcessorUse(time.monotonic(), busy, own_s)


def pressure(before: ProcessorUse, after: ProcessorUse, *, cores: int, threads: int) -> float:
    """The share of the time of `threads` that other programs took away, from 0 to 1.

    Work of other programs on cores that would be idle does not count.

    Args:
        cores: that this process may use.
    """
    seconds = after.at - before.at
    if seconds <= 0:
        return 0.0
    others = max(after.busy_s - before.busy_s - (after.own_s - before.own_s), 0.0) / seconds
    return min(max(others + threads - cores, 0.0) / threads, 1.0)


class ContentionWatch:
    """Observes other programs from its creation on.

    Args:
        threads: that the measurement keeps busy.
        computing: the measurement computes all the time and waits for nothing. If this process and its
            children run for less than half of the time, they were stopped or starved, and all of the time
            counts as taken away.
    """

    def __init__(self, threads: int, *, computing: bool = False) -> None:
        self._threads = threads
        self._computing = computing
        self._before = read_load()

    @property
    def pressure(self) -> float:
        """The share of the threads' time that other programs have taken away so far."""
        cores = len(allowed_numbers() or ()) or os.cpu_count() or 1
        now = read_load()
        if self._computing and now.own_s - self._before.own_s < (now.at - self._before.at) / 2:
            return 1.0
        return pressure(self._before, now, cores=cores, threads=min(self._threads, cores))

    @property
    def disturbed(self) -> bool:
        """True if that is too much for the measurement to be trusted."""
        return self.pressure > DISTURBED
