"""The worker: a model, a thread that answers several requests in shared passes, and a bounded queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request, RequestSource
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, PassRecord
from edgespec.progress import Progress
from edgespec.serving.api.refusals import (
    QueueFull,
    ShuttingDown,
    Unavailable,
    log_bug,
    reason_of,
    refusal_for,
)
from edgespec.serving.metrics import Metrics
from edgespec.serving.served_model import ServedModel

Open = Callable[[Progress], ServedModel]

_TELL_EVERY_S = 1.0
_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0


@dataclass(frozen=True)
class PrefillProgress:
    """The progress of reading a prompt.

    Attributes:
        read: tokens that were read so far, of `total`.
        seconds: since the reading began.
    """

    read: int
    total: int
    seconds: float

    @property
    def seconds_left(self) -> float:
        """The time that the rest takes, judging by what was read."""
        return self.seconds / self.read * (self.total - self.read) if self.read else 0.0

    def __str__(self) -> str:
        return f"{self.read} of {self.total} tokens, {self.seconds_left:.0f} s left"


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


@dataclass(eq=False)
class PendingAnswer:
    """One answer that a client is waiting for.

    Attributes:
        tokens: the prompt.
        slot: of the request, which may have asked for several answers.
        traced: its chunks show the trees of its passes.
        asked_at: when it was put into the queue, by the monotonic clock.
        said_something: whether its answer has begun.
        raw: the answer continues a text, so nothing in it is a thought or a tool call.
        scored_from: as of a `Request`.
        read_from: when its prompt began to be read, by the monotonic clock; 0 before.
        told_at: when the client was last told how far that has come.
    """

    tokens: list[int]
    config: GenerationConfig
    slot: QueueSlot
    raw: bool = True
    traced: bool = False
    scored_from: int | None = None
    events: asyncio.Queue[Chunk | PrefillProgress | Exception | None] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    request: Request = field(init=False)
    asked_at: float = field(default_factory=time.monotonic)
    said_something: bool = False
    read_from: float = 0.0
    told_at: float = 0.0

    def __post_init__(self) -> None:
        self.request = Request(
            self.tokens,
            self.config,
            raw=self.raw,
            key=self,
            traced=self.traced,
            on_prefill=self._tell_progress,
            scored_from=self.scored_from,
        )

    @property
    def cancelled(self) -> bool:
        """True if the client is no longer waiting."""
        return self.request.cancelled

    async def chunks(self) -> AsyncIterator[Chunk | PrefillProgress]:
        """The answer as it is generated, and before it how far its prompt was read.

        Raises:
            Exception: whatever the engine raised.
        """
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def begin(self) -> None:
        """Note that the engine has taken the request."""
        self.read_from = time.monotonic()

    def _tell_progress(self, read: int, total: int) -> None:
        """Say how much of the prompt was read, now and then; called by the worker's thread."""
        now = time.monotonic()
        if read < total and now - self.told_at >= _TELL_EVERY_S:
            self.told_at = now
            self.deliver(PrefillProgress(read, total, now - self.read_from))

    def deliver(self, event: Chunk | PrefillProgress | Exception | None) -> None:
        """Pass something to the waiting client; called by the worker's thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the event loop is closed
            self.request.cancelled = True


class EngineWorker(RequestSource):
    """Answers requests in order of arrival, several at once, and reloads a model that failed.

    Args:
        model: closed by the worker.
        waiting: most requests in the queue, besides those being answered.
        parallel: most answers at once.
        reopen: loads the model again; takes a progress callback, which may raise to stop loading.
        on_trouble: called with a sentence when the model fails, and when it is back.

    Attributes:
        metrics: figures of all answers since the start.
    """

    def __init__(
        self,
        model: ServedModel,
        waiting: int,
        reopen: Open,
        on_trouble: Callable[[str], None],
        *,
        parallel: int = 1,
    ) -> None:
        self._model: ServedModel | None = model
        self._reopen = reopen
        self._on_trouble = on_trouble
        self._parallel = parallel
        self._most = waiting + parallel
        self._open = 0  # requests that hold a slot
        self._borrowers = 0  # users of the engine besides the worker's thread
        self._queue: deque[PendingAnswer] = deque()
        self._running: set[PendingAnswer] = set()
        self._closing = False
        self._trouble = ""
        self._retry_s = _RETRY_S
        self._retry_at = 0.0
        self._changed = threading.Condition()
        self.metrics = Metrics(
            queue_length=lambda: len(self._queue),
            in_flight=lambda: len(self._running),
            is_up=lambda: not self._trouble,
        )
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """The reason why nothing can be answered now; empty if nothing is wrong."""
        return self._trouble

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

    @contextmanager
    def borrowed(self, expected: ServedModel | None = None) -> Iterator[ServedModel]:
        """The model, for what may run beside an answer; it is not closed in the meantime.

        Args:
            expected: the only model that will do; None for whichever is loaded.

        Raises:
            Unavailable: the model failed and has not been reloaded yet, or another one is loaded by now.
        """
        with self._changed:
            model = self._loaded(expected)
            self._borrowers += 1
        try:
            yield model
        finally:
            with self._changed:
                self._borrowers -= 1
                self._changed.notify_all()

    def _loaded(self, expected: ServedModel | None) -> ServedModel:
        """The loaded model; called with the lock held, raises as `borrowed`."""
        if self._model is None or (expected is not None and self._model is not expected):
            raise Unavailable(self._trouble)
        return self._model

    def submit(self, pending: PendingAnswer, model: ServedModel) -> None:
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

    def cancel(self, pending: PendingAnswer) -> None:
        """Abandon an answer: it leaves the queue, or ends with the pass that is running."""
        with self._changed:
            pending.request.cancelled = True
            if pending in self._queue:
                self._queue.remove(pending)
                pending.slot.answer_done()

    def stop(self) -> None:
        """End the running answers, and refuse those that wait."""
        with self._changed:
            self._closing = True
            for pending in (*self._queue, *self._running):
                pending.request.cancelled = True
                pending.deliver(ShuttingDown())
            self._queue.clear()
            if self._model is not None:
                self._model.engine.cancel()
            self._changed.notify_all()

    def close(self) -> None:
        """End everything and free the model."""
        self.stop()
        self._thread.join()
        self._close_model()

    def _give_back(self) -> None:
        with self._changed:
            self._open -= 1

    def pop(self) -> Request | None:
        """The next request of the queue; called by the engine between passes."""
        with self._changed:
            if self._closing or not self._queue:
                return None
            pending = self._queue.popleft()
            self._running.add(pending)
            pending.begin()
            return pending.request

    def wait(self) -> bool:
        """Wait for a request; False if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue)
            return not self._closing

    def _work(self) -> None:
        while True:
            with self._changed:
                wait = max(0.0, self._retry_at - time.monotonic()) if self._model is None else None
                self._changed.wait_for(lambda: self._closing or self._queue, wait)
                if self._closing:
                    return
            if self._model is not None:
                self._answer_requests(self._model.engine)
                continue
            while (request := self.pop()) is not None:
                self._done(request.key, Unavailable(self._trouble))
            if time.monotonic() >= self._retry_at:
                self._load()

    def _answer_requests(self, engine: Engine) -> None:
        """Answer what comes, until the server shuts down or the model fails."""
        weights = engine.target.model.weights
        read = weights.read_bytes

        def count_pass(records: Sequence[PassRecord]) -> None:
            nonlocal read
            before, read = read, weights.read_bytes
            self.metrics.pass_done(len(records), records[0].seconds, read - before)

        try:
            for event in engine.stream_many(self, parallel=self._parallel, on_pass=count_pass):
                pending: PendingAnswer = event.request.key
                if event.chunk is not None:
                    self._count(event.chunk, pending)
                    pending.deliver(event.chunk)
                if event.is_last:
                    self._done(pending, event.error)
        except Exception as error:
            if not self._closing:
                log_bug(error)  # once, however many clients there are
                # Set before the clients get the error, as they may query /health next.
                self._trouble = reason_of(error)
            for pending in tuple(self._running):
                self._done(pending, refusal_for(error))
            if not self._closing:
                self._fail(error)

    def _count(self, chunk: Chunk, pending: PendingAnswer) -> None:
        if chunk.record is not None and not pending.said_something:
            pending.said_something = True
            self.metrics.first_token(time.monotonic() - pending.asked_at)
        self.metrics.tokens_generated(len(chunk.tokens))
        if chunk.generation is not None:
            self.metrics.prompt_cached(chunk.generation.cached_tokens)

    def _done(self, pending: PendingAnswer, error: Exception | None) -> None:
        """Take leave of an answer; its client gets the error, if there is one."""
        with self._changed:
            self._running.discard(pending)
        pending.deliver(error)
        pending.slot.answer_done()

    def _fail(self, error: Exception) -> None:
        """The model can no longer be trusted: close it, and have it reloaded."""
        self._on_trouble(f"The model failed and is being reloaded: {reason_of(error)}")
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
            model = self._reopen(end_if_closing)
        except (Exception, KeyboardInterrupt) as error:  # the latter if loading was stopped
            if isinstance(error, Exception) and reason_of(error) != self._trouble:
                log_bug(error)
            self._trouble = reason_of(error)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            return
        with self._changed:
            self._model = model
            self._trouble = ""
        self._on_trouble("Reloaded the model.")
