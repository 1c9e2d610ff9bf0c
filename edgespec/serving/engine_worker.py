"""The worker that generates: a thread answers several requests in shared passes."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from edgespec.engine.requests import Event, Request, RequestSource
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, PassRecord
from edgespec.serving.model_worker import ModelWorker, Pending
from edgespec.serving.served_model import ServedModel

_TELL_EVERY_S = 1.0


@dataclass(frozen=True)
class PrefillProgress:
    """The progress of reading a prompt."""

    read: int  # tokens that were read so far, of `total`
    total: int
    seconds: float  # since the reading began

    @property
    def seconds_left(self) -> float:
        """The time that the rest takes, judging by what was read."""
        return self.seconds / self.read * (self.total - self.read) if self.read else 0.0

    def __str__(self) -> str:
        return f"{self.read} of {self.total} tokens, {self.seconds_left:.0f} s left"


@dataclass(eq=False, kw_only=True)
class PendingAnswer(Pending[Chunk | PrefillProgress]):
    """One answer that a client is waiting for.

    Attributes:
        tokens: the prompt.
        traced: its chunks show the trees of its passes.
        said_something: whether its answer has begun.
        raw: the answer continues a text, so nothing in it is a thought or a tool call.
        scored_from, owner: as of a `Request`.
        read_from: when its prompt began to be read, by the monotonic clock; 0 before.
        progress_at: when the client was last told how far that has come.
    """

    tokens: list[int]
    config: GenerationConfig
    raw: bool = True
    traced: bool = False
    scored_from: int | None = None
    owner: bytes = b""
    request: Request = field(init=False)
    said_something: bool = False
    read_from: float = 0.0
    progress_at: float = 0.0

    def __post_init__(self) -> None:
        self.request = Request(
            self.tokens,
            self.config,
            raw=self.raw,
            key=(this := weakref.ref(self)),  # no cycle, which would keep the prompt until it is collected
            traced=self.traced,
            on_prefill=partial(_tell_progress, this),
            scored_from=self.scored_from,
            owner=self.owner,
        )

    def cancel(self) -> None:
        super().cancel()
        self.request.cancelled = True

    def begin(self) -> None:
        self.read_from = time.monotonic()

    def tell_progress(self, read: int, total: int) -> None:
        """Say how much of the prompt was read, now and then; called by the worker's thread."""
        now = time.monotonic()
        if read < total and now - self.progress_at >= _TELL_EVERY_S:
            self.progress_at = now
            self.deliver(PrefillProgress(read, total, now - self.read_from))


def _tell_progress(pending: weakref.ref[PendingAnswer], read: int, total: int) -> None:
    answer = pending()
    if answer is not None:
        answer.tell_progress(read, total)


async def chunks_of(
    answers: Sequence[PendingAnswer],
) -> AsyncGenerator[tuple[int, Chunk | PrefillProgress], None]:
    """Yield the chunks of several answers as they come, each with the place of its answer.

    Raises:
        Exception: whatever the model raised.
    """
    if len(answers) == 1:  # without a task for each chunk
        async for chunk in answers[0].results():
            yield 0, chunk
        return
    results = [answer.results() for answer in answers]
    coming = {_next(result): place for place, result in enumerate(results)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                following, place = task.result(), coming.pop(task)
                if following is not None:
                    coming[_next(results[place])] = place
                    yield place, following
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


def _next(
    results: AsyncIterator[Chunk | PrefillProgress],
) -> asyncio.Task[Chunk | PrefillProgress | None]:
    """Wait for the next chunk of an answer in a task; None if the answer has ended."""

    async def following() -> Chunk | PrefillProgress | None:
        return await anext(results, None)

    return asyncio.create_task(following())


class EngineWorker(ModelWorker[ServedModel, PendingAnswer], RequestSource):
    """Generates answers; see `ModelWorker`."""

    def pop(self) -> Request | None:
        """The next request of the queue; called by the engine between passes."""
        pending = self._take()
        return None if pending is None else pending.request

    def _answer(self, model: ServedModel) -> None:
        weights = model.engine.target.model.weights
        read = weights.read_bytes

        def count_pass(records: Sequence[PassRecord]) -> None:
            nonlocal read
            before, read = read, weights.read_bytes
            self.metrics.pass_done(len(records), records[0].seconds, read - before)

        for event in model.engine.stream_many(self, parallel=self.parallel, on_pass=count_pass):
            self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        """Give an event to its client; a function, so that nothing is held while the worker waits."""
        pending: PendingAnswer = event.request.key()  # it exists until it is done
        if event.chunk is not None:
            self._count(event.chunk, pending)
            pending.deliver(event.chunk)
        if event.is_last:
            self._done(pending, event.error)

    def _count(self, chunk: Chunk, pending: PendingAnswer) -> None:
        if chunk.record is not None and not pending.said_something:
            pending.said_something = True
            self.metrics.first_token(time.monotonic() - pending.asked_at)
        self.metrics.tokens_generated(len(chunk.tokens))
        if chunk.generation is not None:
            self.metrics.prompt_cached(chunk.generation.cached_tokens)
