"""Access to an engine: one caller at a time, and none once it is closed.

Closing frees memory that llama.cpp computes in, so it must wait until no thread is inside. It sets the abort
flag first, so the wait is short. A thread that was generating an answer notices at its next step.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from edgespec.errors import BackendError, UsageError
from edgespec.models.llama.runtime import forks
from edgespec.models.llama.runtime.abort import AbortFlag

Answer = Generator[Any, None, None]


class Usage:
    """Controls the use of one engine's models.

    Args:
        abort: ends a running computation.
    """

    def __init__(self, abort: AbortFlag) -> None:
        self._abort = abort
        # Reentrant, because a callback of an answer may close the engine.
        self._inside = threading.RLock()
        self._taking = threading.Lock()
        self._answer: weakref.ref[Answer] | None = None
        self._closing = self._closed = self._forked = False
        forks.notify_of_forks(self)

    @property
    def closed(self) -> bool:
        """Whether the engine is closed, or about to be."""
        return self._closing or self._forked

    def check(self) -> None:
        """Raise unless the engine can be used.

        Raises:
            BackendError: it is closed, or was loaded before this process was forked.
        """
        if self._forked:
            raise forks.refusal()
        if self._closing:
            raise BackendError("The engine is closed.", "Load it again.")

    def begin(self, answer: Answer) -> None:
        """Begin an answer. The engine is free again once its generator has ended, however that happens.

        Raises:
            UsageError: another answer has begun and not ended.
            BackendError: as `check`.
        """
        with self._taking:
            self.check()
            other = self._answer() if self._answer is not None else None
            if other is not None and inspect.getgeneratorstate(other) != inspect.GEN_CLOSED:
                raise UsageError(
                    "The engine is busy with another answer.", "Read that one to its end, or close it."
                )
            self._answer = weakref.ref(answer)

    def clear_abort(self) -> None:
        """Allow passes to run again, unless the engine is being closed."""
        self._abort.clear()
        if self._closing:
            self._abort.set()

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
        """The same for cleaning up: never raises, and yields whether the models still exist."""
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
        self._inside, self._taking = threading.RLock(), threading.Lock()
