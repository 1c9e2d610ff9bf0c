"""Counts bytes that are read, and the time of reading, by several threads at once."""

from __future__ import annotations

import time


class ReadMeter:
    """Counts reads. Its owner's lock must be held by whoever calls.

    Attributes:
        n_bytes: read so far.
        seconds: during which any read was under way.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self.seconds = 0.0
        self._under_way, self._since = 0, 0.0

    def begun(self) -> None:
        """A read begins."""
        self._count(+1)

    def ended(self, n_bytes: int) -> None:
        """A read has ended."""
        self._count(-1)
        self.n_bytes += n_bytes

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        if self._under_way:
            self.seconds += now - self._since
        self._under_way += change
        self._since = now
