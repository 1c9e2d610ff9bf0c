"""Input lines as they come: from a file at once, from a pipe when somebody has written them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from edgespec.cli.batch.input.job import Job

_AHEAD = 64  # lines that are read from a pipe before they are needed
_LOOK_S = 0.1  # how often it is checked whether waiting is to end


class JobQueue:
    """The jobs of an input, one after the other, without waiting unless told to.

    Args:
        jobs: read in a thread of its own if `waits`.
        waits: reading a line may take any time, because something else writes it.
    """

    def __init__(self, jobs: Iterator[Job], *, waits: bool) -> None:
        self._jobs = jobs
        self._ended = False
        self._read: queue.Queue[Job | Exception | None] | None = None
        self._next: Job | Exception | None = None
        if waits:
            self._read = queue.Queue(_AHEAD)
            threading.Thread(target=self._read_all, args=(self._read,), daemon=True).start()

    def take(self) -> Job | None:
        """The next job; None if there is none now."""
        if self._read is None:
            return next(self._jobs, None)
        item, self._next = self._next, None
        if item is None and not self._ended:
            try:
                item = self._read.get_nowait()
            except queue.Empty:
                return None
            self._ended = item is None
        if isinstance(item, Exception):
            raise item
        return item

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Wait for a job, or until `stopped`; False if there will be none."""
        if self._read is None:
            return False
        while self._next is None and not self._ended and not stopped():
            try:
                self._next = self._read.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            self._ended = self._next is None
        return self._next is not None

    def _read_all(self, read: queue.Queue[Job | Exception | None]) -> None:
        try:
            for job in self._jobs:
                read.put(job)
        except Exception as error:  # whatever it is, the thread that answers raises it
            read.put(error)
        read.put(None)
