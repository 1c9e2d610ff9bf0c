"""Access to an engine: one call at a time, in the order in which they came, and none once it is closed.

A call holds a lock of its own from its beginning to its end. A `with` statement releases that lock wherever a
generator is dropped or interrupted, because no exception can come between the lines of C code.

Cancelling marks the calls that exist, whether they have the engine, wait for it or have not asked for it yet.
A marked call ends as soon as it has the engine; calls that are made later are not marked.

Closing frees memory that llama.cpp computes in, so it must wait until no thread is inside. It sets the abort
flag first, so the wait is short. A thread that was generating an answer notices at its next step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from edgespec.errors import BackendError, UsageError
from edgespec.llama.runtime import forks
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted

Result = TypeVar("Result")

_LOOK_S = 0.05  # how often a waiting call looks for others that ended without saying so


class Call:
    """A call of an engine.

    Attributes:
        active: locked from when the call begins, and waits for the engine, until it has ended.
        thread: the thread that has begun it; None before.
        cancelled: the call must end as soon as it has the engine.
    """

    def __init__(self) -> None:
        self.active = threading.Lock()
        self.thread: int | None = None
        self.cancelled = False


class ExclusiveAccess:
    """Controls the use of one engine's models.

    Args:
        abort: ends a running computation.
    """

    def __init__(self, abort: AbortFlag) -> None:
        self._abort = abort
        self._closing = self._closed = self._forked = False
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._begun: list[Call] = []  # the first that is active has the engine, the others wait
        self._make_locks()
        forks.notify_of_forks(self)

    def _make_locks(self) -> None:
        self._inside = threading.RLock()  # a callback of an answer may close the engine
        self._lock = threading.RLock()  # a signal handler may cancel
        self._changed = threading.Condition(self._lock)

    @property
    def closed(self) -> bool:
        """True if the engine is closed, or about to be."""
        return self._closing or self._forked

    def check(self, call: Call | None = None) -> None:
        """Raise unless the engine can be used.

        Args:
            call: which must not be cancelled.

        Raises:
            BackendError: it is closed, or was loaded before this process was forked.
            DecodeAborted: the call is cancelled.
        """
        if self._forked:
            raise forks.refusal()
        if self._closing:
            raise BackendError("The engine is closed.", "Load it again.")
        if call is not None and call.cancelled:
            raise DecodeAborted

    @property
    def waiting(self) -> int:
        with self._lock:
            return max(len(self._active()) - 1, 0)

    def call(self) -> Call:
        """A new call, which can be cancelled although it has not begun."""
        call = Call()
        with self._lock:
            self._calls.add(call)
        return call

    @contextmanager
    def turn(self, call: Call) -> Iterator[None]:
        """A context in which a call that is active has the engine; first waits for those that began before.

        Raises:
            UsageError: this thread has begun an earlier call that has not ended, so waiting would never end.
            BackendError: as `check`.
        """
        try:
            with self._lock:
                call.thread = threading.get_ident()
                self._begun = [*self._active(), call]
                while (begun := self._active())[0] is not call:
                    before = begun[: begun.index(call)]
                    if any(other.thread == call.thread for other in before):
                        raise UsageError(
                            "The engine is busy with another answer.",
                            "Read that one to its end, or close it.",
                        )
                    self.check()
                    self._changed.wait(_LOOK_S)
                self.check()
                self._abort.clear()
                if call.cancelled or self._closing:
                    self._abort.set()
            yield
        finally:
            with self._lock:
                self._begun = [other for other in self._begun if other is not call]
                self._changed.notify_all()

    def run(self, work: Callable[[], Result]) -> Result:
        """Do something for which a call must have the engine; raises as `turn`, and what `work` does."""
        call = self.call()
        with call.active, self.turn(call), self.held():
            return work()

    def _active(self) -> list[Call]:
        return [call for call in self._begun if call.active.locked()]

    def cancel(self) -> None:
        """End the calls that were made and have not ended; may be called from signal handlers."""
        with self._lock:
            for call in self._calls:
                call.cancelled = True
            self._abort.set()  # for the call that has the engine; the next one sets the flag anew

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which no other thread can free the models.

        Raises:
            BackendError: as `check`.
        """
        with self._inside:
            self.check()
            yield

    @contextmanager
    def held_for_cleanup(self) -> Iterator[bool]:
        """`held` for cleaning up: never raises, and yields whether the models still exist."""
        with self._inside:
            yield not (self._closed or self._forked)

    def close(self, free: Callable[[], None]) -> None:
        """End a running computation, wait for it, and free the models; a second call does nothing.

        In a forked process nothing is freed: the models belong to the process that loaded them.
        """
        self._closing = True
        self._abort.set()
        with self._inside:
            if not self._closed and not self._forked:
                free()
                self._closed = True

    def forked(self) -> None:
        """Called in a forked process, where the threads that held locks no longer exist to release them."""
        self._forked = True
        self._make_locks()
