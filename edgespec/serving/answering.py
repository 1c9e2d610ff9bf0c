"""What becomes of a POST: received, checked and tokenized beside the event loop, queued, answered.

Wherever a request is, it is given up as soon as its client has left or the server ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from edgespec.errors import EdgeSpecError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.serving import protocol
from edgespec.serving.bodies import Bodies, Body, parse
from edgespec.serving.limits import Limits
from edgespec.serving.refusals import Refusal, ShuttingDown, refusal_for
from edgespec.serving.requests import Request, check_size, nth_config, read_request, too_long
from edgespec.serving.worker import Place, Task, Worker

HALF_CLOSED = "edgespec.half_closed"
"""Where a request's state has the asyncio.Event that is set when the client sends nothing more."""

_THREADS = 2
_LAST_WORDS_S = 1.0
_LOOK_S = 0.1
_PROBE_S = 1.0
_SILENCE_S = 15.0
_COMMENT = b": waiting\n\n"
_EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_log = logging.getLogger("uvicorn.error")


class Answering:
    """Answers completions.

    Args:
        model: the name it answers to.
        defaults: settings that requests leave open.
    """

    def __init__(self, worker: Worker, model: str, defaults: GenerationConfig, limits: Limits) -> None:
        self._worker = worker
        self._model = model
        self._defaults = defaults
        self._limits = limits
        self._bodies = Bodies(limits)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Refuse or end every request."""
        self._stopping.set()
        self._worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def answer(self, reply: Reply, *, chat: bool) -> None:
        """Answer one request; returns when it is answered, refused or given up."""
        try:
            async with self._bodies.received(reply.http) as body:
                await self._while_wanted(reply, self._respond(reply, body, chat=chat))
        except ClientDisconnect:
            pass
        except Exception as error:
            if not isinstance(error, Refusal | EdgeSpecError):
                _log.error("Bug: %s", error, exc_info=error if _log.isEnabledFor(logging.INFO) else None)
            await reply.refuse(refusal_for(error))

    async def _while_wanted(self, reply: Reply, work: Coroutine[Any, Any, None]) -> None:
        """Do the work until the client leaves or the server ends."""
        working = asyncio.create_task(work)
        gone = asyncio.create_task(_until_gone(reply.http))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({working, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not gone.done():  # what waits for the worker is told that it ends
                await asyncio.wait({working}, timeout=_LAST_WORDS_S)
        finally:
            for task in (working, gone, stopping):
                task.cancel()
            await asyncio.gather(working, gone, stopping, return_exceptions=True)
        if not working.cancelled():
            working.result()
        elif self._stopping.is_set():
            raise ShuttingDown

    async def _respond(self, reply: Reply, body: Body, *, chat: bool) -> None:
        if self._stopping.is_set():
            raise ShuttingDown
        with self._worker.place() as place:
            loop = asyncio.get_running_loop()
            request, tokens = await loop.run_in_executor(
                self._threads, lambda content: self._prepare(content, chat=chat), body.content
            )
            self._bodies.drop(body)
            form = protocol.Reply(chat=chat, model=self._model)
            if request.stream:
                await reply.stream(self._events(request, tokens, place, form))
            else:
                answers = [answer async for answer in self._answers(request, tokens, place)]
                await reply.whole(form.whole(answers))

    def _prepare(self, content: bytearray, *, chat: bool) -> tuple[Request, list[int]]:
        """What the body asks for, and the tokens of its prompt; called by a thread of its own."""
        limits = self._limits
        with self._worker.lent() as engine:
            if chat and not engine.has_chat_template:
                text = "The model has no chat template, so only /v1/completions is served here."
                raise Refusal(400, text, "no_chat_template")
            body = parse(content, values=limits.values + engine.context, depth=limits.depth)
            request = read_request(body, self._defaults, chat=chat, model=self._model, limits=limits)
            n_vocab = engine.target.model.vocabulary.n_tokens
            check_size(request.prompt, context=engine.context, n_vocab=n_vocab, limits=limits)
            tokens = engine.encoder.encode(request.prompt, raw=not chat)
            if not tokens:
                raise UsageError("The prompt is empty.")
            if len(tokens) >= engine.context:
                raise too_long(f"{len(tokens)} tokens", engine.context)
        return request, tokens

    def _task(self, request: Request, tokens: list[int], place: Place, index: int) -> Task:
        last = index == request.answers - 1
        task = Task(tokens, nth_config(request.config, index), place if last else None)
        self._worker.submit(task)
        return task

    async def _answers(
        self, request: Request, tokens: list[int], place: Place
    ) -> AsyncGenerator[Generation, None]:
        for index in range(request.answers):
            task = self._task(request, tokens, place, index)
            try:
                async for chunk in task.chunks():
                    if chunk.generation is not None:
                        yield chunk.generation
            finally:
                self._worker.cancel(task)  # nothing to cancel, unless the request was given up

    async def _events(
        self, request: Request, tokens: list[int], place: Place, form: protocol.Reply
    ) -> AsyncGenerator[dict[str, Any], None]:
        answers: list[Generation] = []
        try:
            for index in range(request.answers):
                task = self._task(request, tokens, place, index)
                try:
                    begin = form.first(index)
                    if begin is not None:
                        yield begin
                    async for chunk in task.chunks():
                        if chunk.text:
                            yield form.piece(index, chunk.text)
                        if chunk.generation is not None:
                            answers.append(chunk.generation)
                            yield form.last(index, chunk.generation)
                finally:
                    self._worker.cancel(task)
            if request.with_usage:
                yield form.usage(answers)
        except Exception as error:
            yield dict(refusal_for(error).body)


class Reply:
    """Where one request is answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.http = HTTPRequest(scope, receive)
        self._scope = scope
        self._receive = receive
        self._to_client = send
        self._started = False
        half_closed = scope.get("state", {}).get(HALF_CLOSED)
        self._half_closed: asyncio.Event = half_closed or asyncio.Event()

    async def whole(self, body: Mapping[str, object]) -> None:
        """Send a whole answer."""
        await JSONResponse(body)(self._scope, self._receive, self._send)

    async def refuse(self, refusal: Refusal) -> None:
        """Send an error, unless an answer has begun."""
        if not self._started:
            await refusal.response()(self._scope, self._receive, self._send)

    async def stream(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        """Send an answer event by event, and a comment now and then while there is none."""
        headers = [(name.encode(), value.encode()) for name, value in _EVENT_STREAM.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(_with_comments(events, self._half_closed)) as pieces:
            async for piece in pieces:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send(self, message: Message) -> None:
        self._started = True
        await self._to_client(message)


async def _with_comments(
    events: AsyncGenerator[dict[str, Any], None], half_closed: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """The events as they are sent.

    Comments keep proxies from giving up on a long wait. To a client that sends nothing more they are sent
    sooner, as the system of one that has left answers with a reset.
    """

    async def following() -> dict[str, Any] | None:
        return await anext(events, None)

    coming = asyncio.create_task(following())
    silence = 0.0
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=_LOOK_S)
            if done:
                event = coming.result()
                if event is None:
                    return
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
                coming, silence = asyncio.create_task(following()), 0.0
                continue
            silence += _LOOK_S
            if silence >= (_PROBE_S if half_closed.is_set() else _SILENCE_S):
                yield _COMMENT
                silence = 0.0
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


async def _until_gone(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
