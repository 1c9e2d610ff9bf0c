"""Workers of any kind of model: a thread, a bounded queue, and a reload after a failure."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from edgespec.api.refusals import (
    LoadFailed,
    QueueFull,
    ShuttingDown,
    Unavailable,
    log_bug,
    reason_of,
    refusal_for,
)
from edgespec.base.progress import Progress, told_of_waiting
from edgespec.machine.memory import release_free_memory
from edgespec.serving.metrics import Metrics
from edgespec.serving.ollama.model_card import ModelCard

_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_IDLE_S = 1.0  # after which free memory goes back to the system


class Served(Protocol):
    card: ModelCard  # the description of its files

    def cancel(self) -> None:
        """End what is being computed."""

    def close(self) -> None:
        """Free the model."""


class QueueSlot:
    """A slot of the queue, held by a request until its answers are done or it is abandoned.

    Attributes:
        answers: how many of them are not done.
    """

    def __init__(self, give_back: Callable[[], None]) -> None:
        self.answers = 1
        self._give_back: Callable[[], None] | None = give_back

    def answer_done(self) -> None:
        """Note that an answer is done; the slot is given back with the last one."""
        self.answers -= 1
        if self.answers <= 0:
            self.release()

    def release(self) -> None:
        """Give it back; further calls do nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


Result = TypeVar("Result")


@dataclass(eq=False, kw_only=True)
class Pending(Generic[Result]):
    """Something that a client is waiting for."""

    slot: QueueSlot  # of the request, which may have asked for several answers
    cancelled: bool = field(default=False, init=False)  # whether the client is no longer waiting
    events: asyncio.Queue[Result | Exception | None] = field(default_factory=asyncio.Queue, init=False)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop, init=False)
    # When it was put into the queue, by the monotonic clock
    asked_at: float = field(default_factory=time.monotonic, init=False)

    def cancel(self) -> None:
        """Note that the client is no longer waiting."""
        self.cancelled = True

    def begin(self) -> None:
        """Note that the model has taken the request."""

    async def results(self) -> AsyncIterator[Result]:
        """The output of the model, as it comes.

        Raises:
            Exception: whatever the model raised.
        """
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def deliver(self, event: Result | Exception | None) -> None:
        """Pass something to the waiting client; None ends it. Called by the worker's thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the event loop is closed
            self.cancel()


ServedT = TypeVar("ServedT", bound=Served)
PendingT = TypeVar("PendingT", bound=Pending[Any])


class ModelWorker(ABC, Generic[ServedT, PendingT]):
    """Answers requests in order of arrival, several at once, and reloads a model that failed.

    Args:
        model: closed by the worker; None loads it for the first request.
        waiting: most requests in the queue, besides those being answered.
        parallel: most answers at once.
        keep_alive: seconds that an idle model stays loaded; for ever if it is negative.
        reopen: loads the model again; takes a progress callback, which may raise to stop loading.
        on_status: called with a sentence when the model fails, and when it is back.
        card: the description of the model, if it is not loaded yet.

    Attributes:
        parallel: as given.
        card: the description of the model that is loaded, or was.
        asleep: whether the model is not loaded, although nothing is wrong; the next request loads it.
        metrics: figures of all answers since the start.
    """

    def __init__(
        self,
        model: ServedT | None,
        waiting: int,
        reopen: Callable[[Progress], ServedT],
        on_status: Callable[[str], None],
        *,
        parallel: int = 1,
        keep_alive: float = -1.0,
        card: ModelCard | None = None,
    ) -> None:
        self._model: ServedT | None = model
        known = card if model is None else model.card
        assert known is not None, "a model, or its description"
        self.card = known
        self._usual_keep_alive = self._keep_alive = keep_alive
        self._idle_since = time.monotonic()
        self.asleep, self._wanted = model is None, False
        self._is_to_leave = False
        self._reopen = reopen
        self._on_status = on_status
        self.parallel = parallel
        self._most = waiting + parallel
        self._open = 0  # requests that hold a slot
        self._borrowers = 0  # users of the engine besides the worker's thread
        self._queue: deque[PendingT] = deque()
        self._running: set[PendingT] = set()
        self._closing = False
        self._failure = ""
        self._retry_s = _RETRY_S
        self._retry_at = 0.0
        self._changed = threading.Condition()
        self.metrics = Metrics(
            queue_length=lambda: len(self._queue),
            in_flight=lambda: self.running,
            is_up=lambda: not self._failure,
        )
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """The reason why nothing can be answered now; empty if nothing is wrong."""
        return "" if self.asleep else self._failure

    @property
    def running(self) -> int:
        """Number of answers that are being generated."""
        return len(self._running)

    @property
    def is_busy(self) -> bool:
        """True while requests hold a slot of the queue."""
        return self._open > 0

    @contextmanager
    def queue_slot(self) -> Iterator[QueueSlot]:
        """A slot of the queue, for one request.

        Raises:
            QueueFull: there is none.
        """
        with self._changed:
            if self._open >= self._most:
                raise QueueFull
            self._open += 1
        slot = QueueSlot(self._give_back)
        try:
            yield slot
        finally:
            slot.release()

    def keep(self, seconds: float | None) -> None:
        """Keep an idle model loaded for so long; as long as usual if that is None."""
        with self._changed:
            self._keep_alive = self._usual_keep_alive if seconds is None else seconds
            self._idle_since = time.monotonic()
            self._changed.notify_all()

    @contextmanager
    def borrowed(self, expected: ServedT | None = None) -> Iterator[ServedT]:
        """The model, for what may run beside an answer; it is not closed in the meantime.

        A model that is asleep is loaded first, which may take minutes.

        Args:
            expected: the only model that will do; None for whichever is loaded.

        Raises:
            Unavailable: the model failed and has not been reloaded yet, or another one is loaded by now.
            LoadFailed: it was asleep, and cannot be loaded.
            ShuttingDown: the server ended before the model was loaded.
        """
        with self._changed:
            if expected is None and self.asleep:
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._wanted or self._closing)
                if self._closing:
                    raise ShuttingDown
                if self.asleep:
                    raise LoadFailed(self._failure)
            model = self._loaded(expected)
            self._borrowers += 1
        try:
            yield model
        finally:
            with self._changed:
                self._borrowers -= 1
                self._changed.notify_all()

    def _loaded(self, expected: ServedT | None) -> ServedT:
        """The loaded model; called with the lock held, raises as `borrowed`."""
        if self._model is None or (expected is not None and self._model is not expected):
            raise Unavailable(self._failure)
        return self._model

    def unload(self) -> None:
        """Free the model until a request needs it; returns when that is done, once nobody uses it."""
        with self._changed:
            self._is_to_leave = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_to_leave or self._closing)

    def submit(self, pending: PendingT, model: ServedT) -> None:
        """Put an answer into the queue.

        Args:
            model: the model whose tokens its prompt has.

        Raises:
            ShuttingDown: no more requests are answered.
            Unavailable: that model failed while the request was prepared.
        """
        with self._changed:
            if self._closing:
                raise ShuttingDown
            self._loaded(model)
            self._queue.append(pending)
            self._changed.notify_all()

    def cancel(self, pending: PendingT) -> None:
        """Abandon an answer: it leaves the queue, or ends with the pass that is running."""
        with self._changed:
            pending.cancel()
            if pending in self._queue:
                self._queue.remove(pending)
                pending.slot.answer_done()

    def stop(self) -> None:
        """End the running answers, and refuse those that wait."""
        with self._changed:
            self._closing = True
            for pending in (*self._queue, *self._running):
                pending.cancel()
                pending.deliver(ShuttingDown())
            self._queue.clear()
            if self._model is not None:
                self._model.cancel()
            self._changed.notify_all()

    def close(self) -> None:
        """End everything and free the model."""
        self.stop()
        self._thread.join()
        self._close_model()

    def _give_back(self) -> None:
        with self._changed:
            self._open -= 1
            if self._is_to_leave:
                self._changed.notify_all()

    def _take(self) -> PendingT | None:
        """The next request of the queue, which is running then; called between passes."""
        with self._changed:
            if self._closing or not self._queue:
                return None
            pending = self._queue.popleft()
            self._running.add(pending)
            pending.begin()
            return pending

    def wait(self) -> bool:
        """Wait for a request; False if there will be no more. Called when nothing is being answered."""

        def is_over() -> bool:
            return self._closing or bool(self._queue)

        with self._changed:
            idle = not self._changed.wait_for(lambda: is_over() or self._is_to_leave, _IDLE_S)
        if idle:  # once, until there was another request
            release_free_memory()
        with self._changed:
            self._idle_since = max(self._idle_since, time.monotonic() - _IDLE_S)
            while not is_over():
                left = self._idle_since + self._keep_alive - time.monotonic()
                if self._is_to_leave and not self._open and not self._borrowers:
                    self.asleep = True
                    return False
                if self._keep_alive < 0:
                    self._changed.wait()
                elif left > 0 or self._open or self._borrowers:
                    self._changed.wait(max(left, _IDLE_S))
                else:
                    self.asleep = True
                    return False
            return not self._closing

    def _sleep(self) -> None:
        """Unload the model, and load it when a request wants it; it stays unloaded if that fails."""
        self._close_model()
        release_free_memory()
        while self.asleep:
            with self._changed:
                self._is_to_leave = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or self._wanted or self._is_to_leave)
                if self._is_to_leave and not self._closing:
                    continue
            if not self._closing:
                self._load()
            with self._changed:
                self.asleep = self._model is None and not self._closing
                self._wanted = False
                self._keep_alive = self._usual_keep_alive
                self._idle_since = time.monotonic()
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            if self.asleep:
                self._sleep()
            with self._changed:
                if self._model is None:  # a loaded one waits in `wait`
                    wait = max(0.0, self._retry_at - time.monotonic())
                    self._changed.wait_for(lambda: self._closing or self._queue or self._is_to_leave, wait)
                if self._closing:
                    return
                self.asleep = self._is_to_leave and self._model is None
                if self.asleep:
                    continue
            if self._model is not None:
                self._answer_requests(self._model)
                continue
            while (pending := self._take()) is not None:
                self._done(pending, Unavailable(self._failure))
            if time.monotonic() >= self._retry_at:
                self._load()

    def _answer_requests(self, model: ServedT) -> None:
        """Answer what comes, until the server shuts down or the model fails."""
        try:
            self._answer(model)
        except Exception as error:
            if not self._closing:
                log_bug(error)  # once, however many clients there are
                # Set before the clients get the error, as they may query /health next.
                self._failure = reason_of(error)
            for pending in tuple(self._running):
                self._done(pending, refusal_for(error))
            if not self._closing:
                self._fail(error)

    @abstractmethod
    def _answer(self, model: ServedT) -> None:
        """Answer what `_take` gives and call `_done` for each, until `wait` returns False.

        Raises:
            Exception: the model failed.
        """

    def _done(self, pending: PendingT, error: Exception | None) -> None:
        """Take leave of an answer; its client gets the error, if there is one."""
        with self._changed:
            self._running.discard(pending)
        pending.deliver(error)
        pending.slot.answer_done()

    def _fail(self, error: Exception) -> None:
        """The model can no longer be trusted: close it, and have it reloaded."""
        self._on_status(f"The model failed and is being reloaded: {reason_of(error)}")
        with suppress(Exception):  # closing a failed model may fail too; it is replaced anyway
            self._close_model()
        self._retry_s, self._retry_at = _RETRY_S, time.monotonic()

    def _close_model(self) -> None:
        with self._changed:
            model, self._model = self._model, None
            self._changed.wait_for(lambda: self._borrowers == 0)
        if model is not None:
            model.close()

    def _load(self) -> None:
        def end_if_closing(_what: str, _fraction: float) -> None:
            if self._closing:
                raise ShuttingDown

        try:
            with told_of_waiting(end_if_closing):
                model = self._reopen(end_if_closing)
        except (Exception, KeyboardInterrupt) as error:  # the latter if loading was stopped
            if isinstance(error, Exception) and reason_of(error) != self._failure:
                log_bug(error)
            self._failure = reason_of(error)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            return
        with self._changed:
            had_failed, self._model, self.card = bool(self._failure), model, model.card
            self._failure = ""
        if had_failed:
            self._on_status("Reloaded the model.")
