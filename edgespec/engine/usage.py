"""Access to an engine: one call at a time, in the order in which they came, and none once it is closed.

A call that finds the engine taken by another thread waits for its turn. A generator may also be dropped or
interrupted anywhere, so a turn ends with its generator, whether or not anybody has said so.

Closing frees memory that llama.cpp computes in, so it must wait until no thread is inside. It sets the abort
flag first, so the wait is short. A thread that was generating an answer notices at its next step.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from edgespec.errors import BackendError, UsageError
from edgespec.models.llama.runtime import forks
from edgespec.models.llama.runtime.abort import AbortFlag

Answer = Generator[Any, None, None]
Step = TypeVar("Step")

_LOOK_S = 0.05  # how often a waiting call looks for generators that ended without saying so


class _NoMore:
    """Ends a generator whose steps may be None."""


_NO_MORE = _NoMore()


@dataclass(eq=False)
class _Turn:
    """A call that has the engine, or waits for it.

    Attributes:
        answer: the call's generator.
        thread: that made the call.
        said_to_end: whether the call has ended in good order.
    """

    answer: weakref.ref[Answer]
    thread: int
    said_to_end: bool = False

    @property
    def is_over(self) -> bool:
        """True if the generator has ended, however that happened."""
        answer = self.answer()
        return self.said_to_end or answer is None or inspect.getgeneratorstate(answer) == inspect.GEN_CLOSED


class Usage:
    """Controls the use of one engine's models.

    Args:
        abort: ends a running computation.
    """

    def __init__(self, abort: AbortFlag) -> None:
        self._abort = abort
        # Reentrant, because a callback of an answer may close the engine.
        self._inside = threading.RLock()
        self._changed = threading.Condition()
        self._turns: list[_Turn] = []  # the first one has the engine, the others wait
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
            return max(len(self._open_turns()) - 1, 0)

    def in_turn(self, begin: Callable[[], Generator[Step, None, None]]) -> Generator[Step, None, None]:
        """The steps of a call, which has the engine as long as this generator exists; see `turn`.

        Args:
            begin: called before the turn is waited for.
        """
        # A weak reference to the generator itself, as a strong one would keep it from being collected.
        own: list[weakref.ref[Generator[Step, None, None]]] = []

        def steps() -> Generator[Step, None, None]:
            inner = begin()
            with self.turn(own[0]):
                yield from inner

        generator = steps()
        own.append(weakref.ref(generator))
        return generator

    @contextmanager
    def turn(self, answer: weakref.ref[Answer]) -> Iterator[None]:
        """A context in which a call has the engine; waits until the calls before it have ended.

        Args:
            answer: the call's generator, which is running. A strong reference would keep it from being
                collected when it is dropped.

        Raises:
            UsageError: this thread has made an earlier call that has not ended, so waiting would never end.
            BackendError: as `check`.
        """
        turn = _Turn(answer, threading.get_ident())
        try:
            with self._changed:
                self._turns.append(turn)
                while (open_turns := self._open_turns())[0] is not turn:
                    before = open_turns[: open_turns.index(turn)]
                    if any(other.thread == turn.thread for other in before):
                        raise UsageError(
                            "The engine is busy with another answer.",
                            "Read that one to its end, or close it.",
                        )
                    self.check()
                    self._changed.wait(_LOOK_S)
                self.check()
            yield
        finally:
            with self._changed:
                turn.said_to_end = True
                self._changed.notify_all()

    def _open_turns(self) -> list[_Turn]:
        self._turns = [turn for turn in self._turns if not turn.is_over]
        return self._turns

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
        self._inside, self._changed = threading.RLock(), threading.Condition()
