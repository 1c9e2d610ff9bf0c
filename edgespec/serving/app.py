"""The HTTP application: routes, errors, streams, and clients that go away."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.errors import ContextLengthError, EdgeSpecError, UsageError
from edgespec.generation import Generation, GenerationConfig
from edgespec.serving import protocol
from edgespec.serving.worker import QueueFull, Task, Worker

_MOST_BODY_BYTES = 64 << 20
_RETRY_S = 5


def make_app(
    worker: Worker, model: str, defaults: GenerationConfig, *, api_key: str | None, hosts: list[str] | None
) -> ASGIApp:
    """The application.

    Args:
        model: the name it answers to.
        defaults: settings that requests leave open.
        api_key: what clients must send as a bearer token; None asks for nothing.
        hosts: names in the Host header that are answered, so that a web page cannot reach a server on this
            machine by a name of its own; None answers all.
    """
    server = _Server(worker, model, defaults)
    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/v1/models", server.list_models),
        Route("/v1/models/{model:path}", server.show_model),
        Route("/health", server.health),
    ]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
    if api_key is not None:
        middleware.append(Middleware(_RequireKey, api_key=api_key))
    handlers: dict[Any, Any] = {404: _no_such_page, 405: _no_such_page, 500: _bug}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


class _RequireKey:
    """Lets nobody in without the key; /health is open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                text = "The API key is missing or wrong."
                body = protocol.failure(text, "invalid_request_error", "invalid_api_key")
                await JSONResponse(body, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Server:
    def __init__(self, worker: Worker, model: str, defaults: GenerationConfig) -> None:
        self._worker = worker
        self._model = model
        self._defaults = defaults
        self._started = int(time.time())

    async def chat(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=True)

    async def complete(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=False)

    async def list_models(self, _http: HTTPRequest) -> Response:
        return JSONResponse(protocol.models(self._model, self._started))

    async def show_model(self, http: HTTPRequest) -> Response:
        if http.path_params["model"] != self._model:
            return _error(f"This server runs {self._model!r}.", 404, "model_not_found")
        return JSONResponse(protocol.model(self._model, self._started))

    async def health(self, _http: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _answer(self, http: HTTPRequest, *, chat: bool) -> Response:
        try:
            body = await _read_json(http)
            request = protocol.read_request(body, self._defaults, chat=chat, model=self._model)
            first = self._start(request, 0)
        except protocol.UnknownModel as error:
            return _error(str(error), 404, "model_not_found")
        except UsageError as error:
            return _error(str(error), 400)
        except QueueFull:
            text = f"Too many requests are waiting already. Try again in {_RETRY_S} seconds."
            return _error(text, 429, "queue_full", {"Retry-After": str(_RETRY_S)}, "rate_limit_error")
        reply = protocol.Reply(request, self._model)
        if request.stream:
            return StreamingResponse(
                self._stream(request, reply, first),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        return await self._whole(http, request, reply, first)

    def _start(self, request: protocol.Request, index: int) -> Task:
        task = Task(request.prompt, protocol.nth_config(request.config, index), raw=not request.chat)
        self._worker.submit(task)
        return task

    async def _whole(
        self, http: HTTPRequest, request: protocol.Request, reply: protocol.Reply, task: Task
    ) -> Response:
        gone = asyncio.create_task(_until_gone(http))
        answers: list[Generation] = []
        try:
            for index in range(request.answers):
                if index:
                    task = self._start(request, index)
                done = asyncio.create_task(_finished(task))
                await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not done.done():
                    done.cancel()
                    raise ClientDisconnect
                answers.append(await done)
        except EdgeSpecError as error:
            return _engine_error(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except QueueFull:
            return _error("Too many requests are waiting.", 429, "queue_full", kind="rate_limit_error")
        finally:
            gone.cancel()
            self._worker.cancel(task)
        return JSONResponse(reply.whole(answers))

    async def _stream(
        self, request: protocol.Request, reply: protocol.Reply, task: Task
    ) -> AsyncIterator[str]:
        answers: list[Generation] = []
        try:
            for index in range(request.answers):
                if index:
                    task = self._start(request, index)
                begin = reply.first(index)
                if begin is not None:
                    yield _event(begin)
                async for chunk in task.chunks():
                    if chunk.text:
                        yield _event(reply.piece(index, chunk.text))
                    if chunk.generation is not None:
                        answers.append(chunk.generation)
                        yield _event(reply.last(index, chunk.generation))
            if request.with_usage:
                yield _event(reply.usage(answers))
        except EdgeSpecError as error:
            yield _event(protocol.failure(str(error), "invalid_request_error", _code(error)))
        except QueueFull:
            yield _event(protocol.failure("Too many requests are waiting.", "rate_limit_error", "queue_full"))
        finally:
            self._worker.cancel(task)  # nothing to cancel, unless the client has gone
        yield "data: [DONE]\n\n"


async def _finished(task: Task) -> Generation:
    answer = None
    async for chunk in task.chunks():
        answer = chunk.generation or answer
    if answer is None:
        raise UsageError("The server is shutting down.")
    return answer


async def _until_gone(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _read_json(http: HTTPRequest) -> object:
    # A web page of another site can send a form or plain text without asking, but not JSON.
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UsageError("The body is not JSON.", "Send it with Content-Type: application/json.")
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > _MOST_BODY_BYTES:
            raise UsageError(f"The body has more than {_MOST_BODY_BYTES >> 20} MiB.")
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError("The body is not JSON.") from error


def _engine_error(error: EdgeSpecError) -> Response:
    status = 400 if isinstance(error, UsageError | ContextLengthError) else 500
    return _error(str(error), status, _code(error))


def _code(error: EdgeSpecError) -> str | None:
    return "context_length_exceeded" if isinstance(error, ContextLengthError) else None


def _error(
    message: str,
    status: int,
    code: str | None = None,
    headers: dict[str, str] | None = None,
    kind: str = "invalid_request_error",
) -> Response:
    return JSONResponse(protocol.failure(message, kind, code), status, headers)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _no_such_page(http: HTTPRequest, error: Any) -> Response:
    return _error(f"There is no {http.method} {http.url.path} here.", error.status_code)


async def _bug(_http: HTTPRequest, error: Exception) -> Response:
    text = f"This is a bug in EdgeSpec: {type(error).__name__}: {error}"
    return _error(text, 500, kind="server_error")
