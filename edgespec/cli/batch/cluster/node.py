"""The actor on each node of a cluster: one engine, which answers the requests that it is given."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.cli.batch.answering import FATAL, BatchRequests, answer_all
from edgespec.cli.interrupt import Interruption
from edgespec.cli.origin import ModelIdentity, model_identity
from edgespec.config import Config
from edgespec.engine.requests import Event, Request, RequestQueue
from edgespec.errors import EdgeSpecError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.option import naming_flags
from edgespec.progress import no_progress
from edgespec.version import __version__

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.text.encoding import Prompt


@dataclass(frozen=True)
class NodeFacts:
    """Facts about a node, known once its engine is loaded.

    Attributes:
        model: the identity of its model, by which nodes with different ones are told apart.
        vocabulary_size: tokens of the model.
        texts: how many requests the engine answers at once.
        description, notes, warnings: see `Engine`.
    """

    model: ModelIdentity
    has_chat_template: bool
    can_think: bool
    vocabulary_size: int
    texts: int
    description: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of a request.

    Attributes:
        answer: None if there is none.
        error: why.
        fatal: the failure is that of the node, which can answer nothing any more.
    """

    answer: Generation | None = None
    error: EdgeSpecError | None = None
    fatal: bool = False


class Node:
    """An engine, and the requests that wait for it.

    Ray calls its methods in one event loop, however many of them wait; the engine has a thread of its own.
    What a person can cause is returned, not raised: Ray would wrap it.
    """

    def __init__(self) -> None:
        self._queue = RequestQueue()
        self._requests: dict[int, Request] = {}
        self._interruption = Interruption()
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._ended: RequestOutcome | None = None  # to all requests, once the thread has ended
        # The node's process has no command line of its own, but its messages are shown by one.
        self._naming = naming_flags()
        self._naming.__enter__()

    async def version(self) -> str:
        """The version of EdgeSpec here."""
        return __version__

    async def load(self, loading: Config) -> NodeFacts | EdgeSpecError:
        """Load the engine, and begin to answer; why that is impossible, if it is."""
        try:
            facts = await asyncio.to_thread(self._load, loading)
        except FATAL as error:
            return _told(error)
        asked = loading.batching.parallel
        parallel = asked if isinstance(asked, int) else None
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._answer_all, args=(loop, parallel), daemon=True)
        self._thread.start()
        return facts

    def _load(self, loading: Config) -> NodeFacts:
        from edgespec import open_engine

        engine = self._engine = open_engine(loading, no_progress)
        asked = loading.batching.parallel
        return NodeFacts(
            model_identity(loading.model),
            engine.has_chat_template,
            engine.can_think,
            engine.vocabulary_size,
            asked if isinstance(asked, int) else engine.texts,
            engine.description,
            tuple(engine.notes),
            tuple(engine.warnings),
        )

    async def answer(
        self, number: int, prompt: Prompt, config: GenerationConfig, raw: bool
    ) -> RequestOutcome:
        """Answer a request.

        Args:
            number: by which `end` knows it.
        """
        if self._ended is not None:
            return self._ended
        outcome: asyncio.Future[RequestOutcome] = asyncio.get_running_loop().create_future()
        request = self._requests[number] = Request(prompt, config, raw, key=outcome)
        self._queue.put(request)
        try:
            return await outcome
        finally:
            del self._requests[number]

    async def end(self, number: int) -> None:
        """End the answer to a request, if it is not finished."""
        if number in self._requests:
            self._requests[number].cancelled = True

    async def cancel(self) -> None:
        """End all answers; what was generated of them is returned as far as there is something."""
        self._interruption.signal = signal.SIGINT
        self._queue.close()
        if self._engine is not None:
            self._engine.cancel()

    async def close(self) -> None:
        """Keep what the engine learned, and free it."""
        self._queue.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def _answer_all(self, loop: asyncio.AbstractEventLoop, parallel: int | None) -> None:
        assert self._engine is not None
        source = BatchRequests(self._taken(), self._queue.wait)
        last = RequestOutcome(Generation(finish_reason="cancelled"))
        try:
            for event in answer_all(source, self._engine, parallel=parallel, interruption=self._interruption):
                if event.is_last:
                    loop.call_soon_threadsafe(_settle, event.request, _outcome(event))
        except Exception as error:  # whatever it is, the other nodes continue
            last = RequestOutcome(error=_told(error), fatal=True)
        loop.call_soon_threadsafe(self._end_all, last)

    def _taken(self) -> Iterator[Request | None]:
        while True:
            yield self._queue.pop()

    def _end_all(self, outcome: RequestOutcome) -> None:
        self._ended = outcome
        for request in self._requests.values():
            _settle(request, outcome)


def _settle(request: Request, outcome: RequestOutcome) -> None:
    if not request.key.done():
        request.key.set_result(outcome)


def _outcome(event: Event) -> RequestOutcome:
    if event.chunk is not None:
        return RequestOutcome(event.chunk.generation)
    assert event.error is not None, "an event without a chunk has an error"
    return RequestOutcome(error=_told(event.error))


def _told(error: BaseException) -> EdgeSpecError:
    """An error that arrives as it is in a process that may lack what raised it."""
    if isinstance(error, EdgeSpecError):
        return error
    return EdgeSpecError(f"{type(error).__name__}: {error}")
