"""Who may use an engine: one answer at a time, and nobody once it is closed.

Closing frees memory that llama.cpp computes in, so it must wait until no thread is inside. It ends what runs
by the abort flag first, so the wait is short. A thread that was answering finds out at its next step.
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
    """The right to use one engine's models.

    Args:
        abort: ends what runs.
    """

    def __init__(self, abort: AbortFlag) -> None:
        self._abort = abort
        # The thread that holds it may take it again: a callback of an answer may close the engine.
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
        """Whether the engine can be used.

        Raises:
            BackendError: it is closed, or was loaded before this process was forked.
        """
        if self._forked:
            raise forks.refusal()
        if self._closing:
            raise BackendError("The engine is closed.", "Load it again.")

    def begin(self, answer: Answer) -> None:
        """An answer begins. However its generator ends, the engine is free then.

        Raises:
            UsageError: another one has begun and not ended.
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
        """Let passes run, unless the engine is being closed."""
        self._abort.clear()
        if self._closing:
            self._abort.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this lasts, no other thread can free the models.

        Raises:
            BackendError: as `check`.
        """
        with self._inside:
            self.check()
            yield

    @contextmanager
    def held_for_cleanup(self) -> Iterator[bool]:
        """The same for what has to be tidied up; tells whether there is something to tidy up still."""
        with self._inside:
            yield not (self._closed or self._forked)

    def close(self, free: Callable[[], None]) -> None:
        """End what runs, wait for it, and free the models; a second time, nothing happens.

        In a process that was forked nothing is freed: it belongs to the process that loaded it.
        """
        self._closing = True
        self._abort.set()
        with self._inside:
            if not self._closed and not self._forked:
                free()
                self._closed = True

    def forked(self) -> None:
        """This process is a fork of the one that loaded the models; locks may be held by threads it lacks."""
        self._forked = True
        self._inside, self._taking = threading.RLock(), threading.Lock()
