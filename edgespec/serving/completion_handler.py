"""Handles a completion request: received, checked and tokenized in a thread, queued, answered.

At every stage, the request is abandoned as soon as its client disconnects or the server shuts down.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.api.completion_request import (
    CompletionRequest,
    TranslatedRequest,
    nth_config,
    read_request,
    with_system,
)
from edgespec.api.endpoint import DirectEndpoint, Endpoint, Event, PromptEndpoint, ResponseBuilder
from edgespec.api.images import RequestImages, without_data
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal, ShuttingDown, Unavailable, logged_refusal
from edgespec.api.warnings import Warnings
from edgespec.base.progress import checked_while_waiting
from edgespec.generation.result import Chunk, Generation
from edgespec.images.reader import UnreadImage, without_reading
from edgespec.images.rows import PlacedImage
from edgespec.serving.engine_worker import EngineWorker, PendingAnswer, PrefillProgress, chunks_of
from edgespec.serving.keys import owner_of
from edgespec.serving.model_worker import QueueSlot
from edgespec.serving.prompts import echoed_prompts, encoded_prompts
from edgespec.serving.request_bodies import RequestBody, parse
from edgespec.serving.request_handler import RequestHandler
from edgespec.serving.request_log import RequestLogEntry
from edgespec.serving.response_sender import ResponseSender
from edgespec.serving.served_model import ServedModel
from edgespec.text.replay import WrittenAnswer

_MAX_WITH_IMAGES = 16  # requests whose images were read and that are not answered yet


@dataclass
class _Exchange:
    """A request that was received, and its answers so far."""

    request: CompletionRequest
    endpoint: PromptEndpoint  # where it came to
    raw: bool  # the answer continues a text
    prompts: list[list[int]]  # the tokens of each prompt
    model: ServedModel  # the one whose tokens these are
    context: Any = None  # what the endpoint needs to build the response
    # The answer that is continued, if the prompt ends with the tokens that the model wrote
    begun: WrittenAnswer | None = None
    # Those in the prompts, which the engine knows for as long as they are held
    images: Sequence[PlacedImage] = ()
    owner: bytes = b""  # who asks
    answers: list[Generation] = field(default_factory=list)
    _done: dict[int, Generation] = field(default_factory=dict, init=False)

    @property
    def n_answers(self) -> int:
        """The number of answers that are asked for, to all prompts together."""
        return self.request.answers * len(self.prompts)

    def note(self, index: int, answer: Generation) -> None:
        """Add an answer in its place: the last one asked for may be done first."""
        self._done[index] = answer
        self.answers[:] = [self._done[place] for place in sorted(self._done)]


@dataclass(frozen=True)
class _DirectReply:
    """A request that needs no answer of the model, what is sent instead, and the warnings about it."""

    reply: Event
    warnings: Sequence[str] = ()


class CompletionHandler(RequestHandler[EngineWorker, Endpoint]):
    """Answers completion requests; see `RequestHandler`.

    Args:
        on_prefill_progress: called with how far the reading of a prompt has come.
        system: the system prompt of conversations that have none; None leaves them without.
    """

    def __init__(
        self,
        worker: EngineWorker,
        model: str,
        limits: Limits,
        *,
        aliases: Sequence[str] = (),
        on_request: Callable[[RequestLogEntry], None] | None = None,
        on_prefill_progress: Callable[[PrefillProgress], None] | None = None,
        system: str | None = None,
    ) -> None:
        super().__init__(worker, model, limits, aliases=aliases, on_request=on_request)
        self._system = system
        self._on_prefill_progress = on_prefill_progress or (lambda _progress: None)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")  # of answers, one after another
        # Of requests whose images take seconds to minutes, so that no others wait behind them.
        self._image_thread = ThreadPoolExecutor(1, thread_name_prefix="images")
        # Rows of images take megabytes, and are held until the answer is there.
        self._image_places = asyncio.Semaphore(_MAX_WITH_IMAGES)

    def stop(self) -> None:
        super().stop()
        self._image_thread.shutdown(wait=False, cancel_futures=True)

    async def _respond(
        self, sender: ResponseSender, endpoint: Endpoint, body: RequestBody, answers: list[Generation]
    ) -> None:
        async with AsyncExitStack() as stack:
            slot = stack.enter_context(self.worker.queue_slot()) if endpoint.waits else None
            exchange = await self._prepared(body, endpoint, stack)
            self.bodies.drop(body)
            if isinstance(exchange, _DirectReply):
                sender.warnings = exchange.warnings
                await sender.whole(exchange.reply)
                return
            assert slot is not None
            exchange.answers = answers
            exchange.owner = owner_of(sender.http.scope)
            n_tokens = sum(map(len, exchange.prompts))
            self.worker.metrics.prompt_accepted(n_tokens)
            sender.warnings = exchange.request.warnings
            model = exchange.request.model or self._model
            builder = exchange.endpoint.response_builder(
                exchange.request, model=model, prompt_tokens=n_tokens, context=exchange.context
            )
            if exchange.request.stream:
                events = self._events(exchange, slot, builder, sender)
                await sender.stream(exchange.endpoint, events, builder)
            else:
                async with aclosing(self._chunks(exchange, slot)) as chunks:
                    async for _ in chunks:
                        pass
                await sender.whole(builder.whole(exchange.answers))

    async def _prepared(
        self, received: RequestBody, endpoint: Endpoint, stack: AsyncExitStack
    ) -> _Exchange | _DirectReply:
        """The request in a body, and the tokens of its prompt.

        Args:
            stack: gets the place of a request whose images are read here.
        """
        loop = asyncio.get_running_loop()
        abandoned = threading.Event()

        def prepare_without_reading() -> _Exchange | _DirectReply | None:
            try:
                with without_reading():
                    return self._prepare(received, endpoint)
            except UnreadImage:
                return None

        def end_if_abandoned() -> None:
            if abandoned.is_set():
                raise ShuttingDown
            if self.worker.failure:  # the model is not closed while it is borrowed
                raise Unavailable(self.worker.failure)

        def prepare() -> _Exchange | _DirectReply:
            with checked_while_waiting(end_if_abandoned):
                return self._prepare(received, endpoint)

        try:
            exchange = await loop.run_in_executor(self._threads, prepare_without_reading)
            if exchange is None:
                await stack.enter_async_context(self._image_places)
                if self._stopping.is_set():
                    raise ShuttingDown
                exchange = await loop.run_in_executor(self._image_thread, prepare)
            return exchange
        finally:
            abandoned.set()

    def _prepare(self, received: RequestBody, endpoint: Endpoint) -> _Exchange | _DirectReply:
        """The request in a body, and the tokens of its prompt; called in a thread."""
        limits = self.limits
        content = received.decoded(limits.body)
        with self.worker.borrowed() as served:
            engine = served.engine
            body = (
                parse(content, values=limits.values + engine.context, depth=limits.depth) if content else {}
            )
            if isinstance(endpoint, DirectEndpoint):
                return _DirectReply(endpoint.reply(body, engine, limits))
            warnings = Warnings()
            asked = endpoint.translate(body, warnings)
            self.worker.keep(endpoint.keep_alive(body))
            if not isinstance(asked, TranslatedRequest):
                return _DirectReply(asked)
            chat = asked.messages is not None
            if chat and not engine.has_chat_template:
                text = "The model has no chat template, so only /v1/completions is served here."
                raise Refusal(400, text, "no_chat_template")
            request = read_request(
                asked,
                served.defaults,
                model=self._model,
                aliases=self.names[1:],
                limits=limits,
                images=RequestImages(limits, warnings, lambda: engine.sees_images, endpoint.image_hint),
            )
            if chat:
                request = with_system(request, self._system)
            prompts, begun = encoded_prompts(served, request, limits, warnings)
            if request.echo:
                request = replace(request, echoed=echoed_prompts(served, request, prompts))
            images: Sequence[PlacedImage] = ()
            if chat and min(prompts[0]) < 0 and engine.encoder.images is not None:
                images = engine.encoder.images.placed(prompts[0])
                messages: Any = request.prompt
                request = replace(request, prompts=(without_data(messages),))
        if endpoint.counts:
            return _DirectReply(endpoint.counted(sum(map(len, prompts))), warnings.sentences)
        request = replace(request, warnings=warnings.sentences)
        raw = not chat or request.continues
        return _Exchange(request, endpoint, raw, prompts, served, asked.context, begun, images)

    async def _answered(self, exchange: _Exchange, index: int, answer: Generation) -> None:
        """Note an answer, and keep it before the client can send it back."""
        exchange.note(index, answer)
        if not exchange.raw or exchange.begun is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._keep, exchange, answer)

    def _keep(self, exchange: _Exchange, answer: Generation) -> None:
        """Keep an answer for the conversation's next turn; called in a thread, as the disk may be slow."""
        with suppress(Unavailable), self.worker.borrowed(exchange.model) as model:
            messages: Any = exchange.request.prompt
            if exchange.begun is not None:
                messages, written = messages[:-1], exchange.begun.extended(answer)
            else:
                written = model.engine.encoder.written(exchange.prompts[0], answer)
            if written is not None:
                model.written.add(messages, written)

    @contextmanager
    def _pending_answers(self, exchange: _Exchange, slot: QueueSlot) -> Iterator[list[PendingAnswer]]:
        """The answers that a request asks for, all on their way; they are abandoned at the end."""
        request = exchange.request
        slot.answers = exchange.n_answers
        traced = request.stream and request.with_speculation
        answers = [
            PendingAnswer(
                tokens=tokens,
                config=nth_config(request.config, n),
                slot=slot,
                raw=exchange.raw,
                traced=traced,
                scored_from=0 if request.scores_prompts else None,
                owner=exchange.owner,
            )
            for tokens in exchange.prompts
            for n in range(request.answers)
        ]
        try:
            for answer in answers:
                self.worker.submit(answer, exchange.model)
            yield answers
        finally:
            for answer in answers:
                self.worker.cancel(answer)  # does nothing if it is done

    async def _chunks(
        self, exchange: _Exchange, slot: QueueSlot
    ) -> AsyncGenerator[tuple[int, Chunk | PrefillProgress], None]:
        """Yield the chunks of all answers as they come, each with the place of its answer."""
        with self._pending_answers(exchange, slot) as answers:
            async with aclosing(chunks_of(answers)) as chunks:
                async for index, chunk in chunks:
                    if isinstance(chunk, PrefillProgress):
                        self._on_prefill_progress(chunk)
                    elif chunk.generation is not None:
                        await self._answered(exchange, index, chunk.generation)
                    yield index, chunk

    async def _events(
        self, exchange: _Exchange, slot: QueueSlot, builder: ResponseBuilder, sender: ResponseSender
    ) -> AsyncGenerator[Event | PrefillProgress, None]:
        try:
            for index in range(exchange.n_answers):
                for event in builder.begin(index):
                    yield event
            async with aclosing(self._chunks(exchange, slot)) as chunks:
                async for index, chunk in chunks:
                    if isinstance(chunk, PrefillProgress):
                        yield chunk
                        continue
                    for event in builder.piece(index, chunk):
                        yield event
                    if chunk.generation is not None:
                        for event in builder.end(index, chunk.generation):
                            yield event
            if exchange.request.with_usage:
                for event in builder.usage(exchange.answers):
                    yield event
        except Exception as error:
            sender.refusal = logged_refusal(error)
            yield sender.failure(sender.refusal)
