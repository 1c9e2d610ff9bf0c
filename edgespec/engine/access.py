"""Access to an engine: one call at a time, in the order in which they came, and none once it is closed.

A call that finds the engine taken by another thread waits for its turn. A generator may also be dropped or
interrupted anywhere, so a turn ends with its generator, whether or not anybody has said so.

Cancelling marks the calls that exist, whether they have the engine, wait for it or have not asked for it yet.
A marked call ends as soon as it has the engine; calls that are made later are not marked.

Closing frees memory that llama.cpp computes in, so it must wait until no thread is inside. It sets the abort
flag first, so the wait is short. A thread that was generating an answer notices at its next step.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from edgespec.errors import BackendError, UsageError
from edgespec.llama.runtime import forks
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted
from edgespec.progress import checked_while_waiting

Answer = Generator[Any, None, None]
Step = TypeVar("Step")

_LOOK_S = 0.05  # how often a waiting call looks for generators that ended without saying so


class _NoMore:
    """Ends a generator whose steps may be None."""


_NO_MORE = _NoMore()


@dataclass(eq=False)
class _Turn:
    """A call that has the engine, waits for it, or was made and not begun.

    Attributes:
        answer: the call's generator. A strong reference would keep one that is dropped from being collected.
        thread: that has begun the call; None before.
        said_to_end: whether the call has ended in good order.
        cancelled: whether it shall end as soon as it has the engine.
    """

    answer: weakref.ref[Answer] | None = None
    thread: int | None = None
    said_to_end: bool = False
    cancelled: bool = False

    @property
    def is_over(self) -> bool:
        """True if the generator has ended, however that happened."""
        answer = self.answer() if self.answer is not None else None
        return self.said_to_end or answer is None or inspect.getgeneratorstate(answer) == inspect.GEN_CLOSED


class ExclusiveAccess:
    """Controls the use of one engine's models.

    Args:
        abort: ends a running computation.
    """

    def __init__(self, abort: AbortFlag) -> None:
        self._abort = abort
        # Reentrant, because a callback of an answer may close the engine.
        self._inside = threading.RLock()
        # Reentrant, because a signal handler may cancel.
        self._changed = threading.Condition(threading.RLock())
        self._turns: list[_Turn] = []  # of those that were begun, the first has the engine, the others wait
        self._closing = self._closed = self._forked = False
        forks.notify_of_forks(self)

    @property
    def closed(self) -> bool:
        """True if the engine is closed, or about to be."""
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

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        with self._changed:
            return max(len(self._begun_turns()) - 1, 0)

    def in_turn(self, begin: Callable[[], Generator[Step, None, None]]) -> Generator[Step, None, None]:
        """The steps of a call, which has the engine as long as this generator exists; see `_taken`.

        Args:
            begin: called before the turn is waited for. What it waits for in child processes ends with
                `DecodeAborted` if the call is cancelled.
        """
        turn = _Turn()

        def check() -> None:
            self.check()
            if turn.cancelled:
                raise DecodeAborted

        def steps() -> Generator[Step, None, None]:
            with checked_while_waiting(check):
                inner = begin()
            with self._taken(turn):
                yield from inner

        generator = steps()
        turn.answer = weakref.ref(generator)
        with self._changed:
            self._turns = [*(turn for turn in self._turns if not turn.is_over), turn]
        return generator

    def run_in_turn(self, work: Callable[[], Step]) -> Step:
        """Do something for which a call must have the engine; raises as `_taken`, and what `work` does."""

        def steps() -> Generator[Step, None, None]:
            yield work()

        with closing(self.in_turn(lambda: self.held_steps(steps()))) as results:
            return next(results)

    @contextmanager
    def _taken(self, turn: _Turn) -> Iterator[None]:
        """A context in which a call has the engine; waits until the calls that began before have ended.

        Raises:
            UsageError: this thread has made an earlier call that has not ended, so waiting would never end.
            BackendError: as `check`.
        """
        try:
            with self._changed:
                turn.thread = threading.get_ident()
                self._turns = [*(other for other in self._turns if other is not turn), turn]
                while (begun := self._begun_turns())[0] is not turn:
                    before = begun[: begun.index(turn)]
                    if any(other.thread == turn.thread for other in before):
                        raise UsageError(
                            "The engine is busy with another answer.",
                            "Read that one to its end, or close it.",
                        )
                    self.check()
                    self._changed.wait(_LOOK_S)
                self.check()
                self._set_abort(turn.cancelled)
            yield
        finally:
            with self._changed:
                turn.said_to_end = True
                self._changed.notify_all()

    def _begun_turns(self) -> list[_Turn]:
        return [turn for turn in self._turns if turn.thread is not None and not turn.is_over]

    def _set_abort(self, cancelled: bool) -> None:
        """Let the call that has the engine run, or not."""
        self._abort.clear()
        if cancelled or self._closing:
            self._abort.set()

    def cancel(self) -> None:
        """End the calls that were made and have not ended; may be called from signal handlers."""
        with self._changed:
            for turn in self._turns:
                turn.cancelled = True
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

    def held_steps(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """Yield from steps, during each of which no other thread can free the models."""
        try:
            while True:
                with self.held():
                    step = next(steps, _NO_MORE)
                if isinstance(step, _NoMore):
                    return
                yield step
        finally:
            with self.held_for_cleanup():
                steps.close()

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
        self._inside, self._changed = threading.RLock(), threading.Condition(threading.RLock())
