"""Handles a completion request: received, checked and tokenized in a thread, queued, answered.

At every stage, the request is abandoned as soon as its client disconnects or the server shuts down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from edgespec.errors import UsageError
from edgespec.generation.result import Generation
from edgespec.models.text.replay import WrittenAnswer
from edgespec.serving.api.completion_request import (
    CompletionRequest,
    check_size,
    nth_config,
    read_request,
    too_long,
    with_system,
)
from edgespec.serving.api.endpoint import Endpoint, Event, ResponseBuilder
from edgespec.serving.api.limits import Limits
from edgespec.serving.api.refusals import Refusal, ShuttingDown, Unavailable, logged_refusal
from edgespec.serving.engine_worker import EngineWorker, PendingAnswer, PrefillProgress, QueueSlot
from edgespec.serving.request_bodies import BodyReceiver, RequestBody, parse
from edgespec.serving.request_log import GONE, RequestLogEntry
from edgespec.serving.served_model import ServedModel

HALF_CLOSED = "edgespec.half_closed"
"""Key in a request's state: an asyncio.Event that is set when the client has closed its sending side."""

REFUSED = "edgespec.refused"
"""Key in a request's state: the refusal that the connection has sent already, if it has."""

_THREADS = 2
_SHUTDOWN_REPLY_S = 1.0
_POLL_S = 0.1
_PROBE_S = 1.0
_KEEP_ALIVE_S = 15.0
_NO_BUFFERING = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass
class _Exchange:
    """A request that was received, and its answers so far.

    Attributes:
        raw: the answer continues a text.
        tokens: the prompt.
        model: the one whose tokens these are.
        begun: the answer that is continued, if the prompt ends with the tokens that the model wrote.
    """

    request: CompletionRequest
    raw: bool
    tokens: list[int]
    model: ServedModel
    begun: WrittenAnswer | None = None
    answers: list[Generation] = field(default_factory=list)


@dataclass(frozen=True)
class _DirectReply:
    """A request that needs no answer of the model, and what is sent instead."""

    reply: Event


class CompletionHandler:
    """Answers completion requests.

    Args:
        model: the name it answers to.
        aliases: other names that it answers to; they may be patterns such as "claude-*".
        limits: bounds on requests.
        on_request: called with an entry for the log when a request is done.
        on_prefill_progress: called with how far the reading of a prompt has come.
        system: the system prompt of conversations that have none; None leaves them without.

    Attributes:
        names: the model's, and its aliases.
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
        self.worker = worker
        self._system = system
        self.names = (model, *aliases)
        self._model = model
        self._aliases = aliases
        self._on_request = on_request
        self._on_prefill_progress = on_prefill_progress or (lambda _progress: None)
        self._limits = limits
        self._bodies = BodyReceiver(limits)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Refuse new requests, and end the others."""
        self._stopping.set()
        self.worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def answer(self, sender: ResponseSender) -> None:
        """Answer one request; returns when it is answered, refused or abandoned."""
        start = time.perf_counter()
        exchanges: list[_Exchange] = []
        try:
            async with self._bodies.received(sender.http) as body:
                await self._until_abandoned(sender, self._respond(sender, body, exchanges))
        except ClientDisconnect:
            sender.note_refused()
        except Exception as error:
            await sender.refuse(logged_refusal(error))
        finally:
            self.worker.metrics.request_ended(sender.outcome)
            if self._on_request is not None:
                answers = [answer for exchange in exchanges for answer in exchange.answers]
                seconds = time.perf_counter() - start
                path, status = sender.http.scope["path"], sender.status or GONE
                self._on_request(RequestLogEntry.of(path, status, seconds, answers, streamed=sender.streamed))

    async def _until_abandoned(self, sender: ResponseSender, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, unless the client disconnects or the server shuts down first."""
        working = asyncio.create_task(work)
        gone = asyncio.create_task(_until_disconnected(sender.http))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({working, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not gone.done():  # the worker still sends its error
                await asyncio.wait({working}, timeout=_SHUTDOWN_REPLY_S)
        finally:
            for task in (working, gone, stopping):
                task.cancel()
            await asyncio.gather(working, gone, stopping, return_exceptions=True)
        if not working.cancelled():
            working.result()
        elif self._stopping.is_set():
            raise ShuttingDown

    async def _respond(self, sender: ResponseSender, body: RequestBody, exchanges: list[_Exchange]) -> None:
        endpoint = sender.endpoint
        if self._stopping.is_set():
            raise ShuttingDown
        # Counting tokens takes no place in the queue: it does not wait for the model.
        with nullcontext() if endpoint.counts else self.worker.queue_slot() as slot:
            loop = asyncio.get_running_loop()
            exchange = await loop.run_in_executor(
                self._threads, lambda content: self._prepare(content, endpoint), body.content
            )
            self._bodies.drop(body)
            if isinstance(exchange, _DirectReply):
                await sender.whole(exchange.reply)
                return
            assert slot is not None
            exchanges.append(exchange)
            self.worker.metrics.prompt_accepted(len(exchange.tokens))
            model = exchange.request.model or self._model
            builder = endpoint.response_builder(
                exchange.request, model=model, prompt_tokens=len(exchange.tokens)
            )
            if exchange.request.stream:
                await sender.stream(self._events(exchange, slot, builder, sender), builder)
            else:
                async for answer in self._answers(exchange, slot):
                    await self._answered(exchange, answer)
                await sender.whole(builder.whole(exchange.answers))

    def _prepare(self, content: bytearray, endpoint: Endpoint) -> _Exchange | _DirectReply:
        """The request in a body, and the tokens of its prompt; called in a thread."""
        limits = self._limits
        with self.worker.borrowed() as served:
            engine = served.engine
            body = parse(content, values=limits.values + engine.context, depth=limits.depth)
            translated = endpoint.translate(body)
            if translated.reply is not None:
                return _DirectReply(translated.reply)
            chat = not translated.raw
            if chat and not engine.has_chat_template:
                text = "The model has no chat template, so only /v1/completions is served here."
                raise Refusal(400, text, "no_chat_template")
            request = read_request(
                translated.body,
                served.defaults,
                chat=chat,
                model=self._model,
                aliases=self._aliases,
                limits=limits,
            )
            if chat:
                request = with_system(request, self._system)
            n_vocab = engine.target.model.vocabulary.n_tokens
            check_size(request.prompt, context=engine.context, n_vocab=n_vocab, limits=limits)
            begun: WrittenAnswer | None = None
            if chat:
                messages: Any = request.prompt
                found = served.written.find(messages)
                encoder, config = engine.encoder, request.config
            if request.continues:
                tokens, begun = encoder.continued(messages, config=config, written=found)
            elif chat:
                tokens = list(encoder.conversation(messages, config=config, written=found).tokens)
            else:
                tokens = engine.encoder.encode(request.prompt, raw=True, config=request.config)
            if not tokens:
                raise UsageError("The prompt is empty.")
            if len(tokens) >= engine.context:
                raise too_long(f"{len(tokens)} tokens", engine.context)
        if endpoint.counts:
            return _DirectReply(endpoint.counted(len(tokens)))
        return _Exchange(request, translated.raw or request.continues, tokens, served, begun)

    async def _answered(self, exchange: _Exchange, answer: Generation) -> None:
        """Note an answer, and keep it before the client can send it back."""
        exchange.answers.append(answer)
        if not exchange.raw or exchange.begun is not None:
            await asyncio.to_thread(self._keep, exchange, answer)

    def _keep(self, exchange: _Exchange, answer: Generation) -> None:
        """Keep an answer for the conversation's next turn; called in a thread, as the disk may be slow."""
        with suppress(Unavailable), self.worker.borrowed(exchange.model) as model:
            messages: Any = exchange.request.prompt
            if exchange.begun is not None:
                messages, written = messages[:-1], exchange.begun.extended(answer)
            else:
                written = model.engine.encoder.written(exchange.tokens, answer)
            if written is not None:
                model.written.add(messages, written)

    @contextmanager
    def _pending_answers(self, exchange: _Exchange, slot: QueueSlot) -> Iterator[list[PendingAnswer]]:
        """The answers that a request asks for, all on their way; they are abandoned at the end."""
        request = exchange.request
        slot.answers = request.answers
        traced = request.stream and request.with_speculation
        answers = [
            PendingAnswer(
                exchange.tokens,
                nth_config(request.config, n),
                slot,
                raw=exchange.raw,
                traced=traced,
            )
            for n in range(request.answers)
        ]
        try:
            for answer in answers:
                self.worker.submit(answer, exchange.model)
            yield answers
        finally:
            for answer in answers:
                self.worker.cancel(answer)  # does nothing if it is done

    async def _answers(self, exchange: _Exchange, slot: QueueSlot) -> AsyncGenerator[Generation, None]:
        with self._pending_answers(exchange, slot) as answers:
            for answer in answers:
                async for chunk in answer.chunks():
                    if isinstance(chunk, PrefillProgress):
                        self._on_prefill_progress(chunk)
                    elif chunk.generation is not None:
                        yield chunk.generation

    async def _events(
        self, exchange: _Exchange, slot: QueueSlot, builder: ResponseBuilder, sender: ResponseSender
    ) -> AsyncGenerator[Event | PrefillProgress, None]:
        try:
            with self._pending_answers(exchange, slot) as answers:
                for index, answer in enumerate(answers):
                    for event in builder.begin(index):
                        yield event
                    async for chunk in answer.chunks():
                        if isinstance(chunk, PrefillProgress):
                            self._on_prefill_progress(chunk)
                            yield chunk
                            continue
                        for event in builder.piece(index, chunk):
                            yield event
                        if chunk.generation is not None:
                            await self._answered(exchange, chunk.generation)
                            for event in builder.end(index, chunk.generation):
                                yield event
            if exchange.request.with_usage:
                for event in builder.usage(exchange.answers):
                    yield event
        except Exception as error:
            sender.refusal = logged_refusal(error)
            yield sender.endpoint.failure(sender.refusal)


class ResponseSender:
    """Sends the answer to one request.

    Attributes:
        endpoint: the path that was asked; decides the form of errors and streams.
        refusal: why there is no answer, or why it is not complete; None if nothing is wrong.
        status: the HTTP status that was sent; 0 before that.
        streamed: whether the answer is sent event by event.
    """

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self.endpoint = endpoint
        self.http = HTTPRequest(scope, receive)
        self.status = 0
        self.streamed = False
        self._scope = scope
        self._receive = receive
        self._to_client = send
        self.refusal: Refusal | None = None
        self._started = self._complete = False
        half_closed = scope.get("state", {}).get(HALF_CLOSED)
        self._half_closed: asyncio.Event = half_closed or asyncio.Event()

    @property
    def outcome(self) -> str:
        """The outcome of the request, as `Metrics` names it."""
        if self.refusal is not None:
            status = self.refusal.status
            return "turned_away" if status == 429 else "failed" if status >= 500 else "refused"
        return "answered" if self._complete else "abandoned"

    def note_refused(self) -> None:
        """Take over the refusal that the connection has sent, if it has."""
        self.refusal = self.http.scope.get("state", {}).get(REFUSED)
        self.status = self.refusal.status if self.refusal else self.status

    async def whole(self, body: Mapping[str, object]) -> None:
        """Send a whole answer."""
        await JSONResponse(body)(self._scope, self._receive, self._send)
        self._complete = True

    async def refuse(self, refusal: Refusal) -> None:
        """Send an error, unless an answer has begun."""
        self.refusal = refusal
        if not self._started:
            await refusal.response(self.endpoint.failure(refusal))(self._scope, self._receive, self._send)

    async def stream(
        self, events: AsyncGenerator[Event | PrefillProgress, None], builder: ResponseBuilder
    ) -> None:
        """Send an answer event by event, with a sign of life now and then while there is none."""
        self.streamed = True
        named = {"content-type": self.endpoint.media_type, **_NO_BUFFERING}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(_framed(events, self.endpoint, builder, self._half_closed)) as pieces:
            async for piece in pieces:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": self.endpoint.last, "more_body": False})
        self._complete = True

    async def _send(self, message: Message) -> None:
        self._started = True
        self.status = message.get("status", self.status)
        await self._to_client(message)


async def _framed(
    events: AsyncGenerator[Event | PrefillProgress, None],
    endpoint: Endpoint,
    builder: ResponseBuilder,
    half_closed: asyncio.Event,
) -> AsyncGenerator[bytes, None]:
    """The events as they are sent, with signs of life in between.

    They keep proxies from giving up during a long wait. A client that has closed its sending side gets them
    sooner: if it has left, its system answers with a reset.
    """

    async def following() -> Event | PrefillProgress | None:
        return await anext(events, None)

    coming = asyncio.create_task(following())
    silence = 0.0
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=_POLL_S)
            if done:
                event = coming.result()
                if event is None:
                    return
                yield (
                    endpoint.prefill_progress(builder, event)
                    if isinstance(event, PrefillProgress)
                    else endpoint.frame(event)
                )
                coming, silence = asyncio.create_task(following()), 0.0
                continue
            silence += _POLL_S
            if silence >= (_PROBE_S if half_closed.is_set() else _KEEP_ALIVE_S):
                yield endpoint.waiting(builder)
                silence = 0.0
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


async def _until_disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
