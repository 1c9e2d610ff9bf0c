"""Serves several models: each has an application of its own, and the name in a request chooses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from edgespec.api import protocol
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal, ShuttingDown, logged_refusal
from edgespec.api.response_store import ResponseStore
from edgespec.base.progress import Progress
from edgespec.errors import EdgeSpecError
from edgespec.serving.app import ANSWERED, Application, guarded, unsupported_routes
from edgespec.serving.kept import routes_to_kept
from edgespec.serving.loaded_models import LoadedModels, OfferedModel
from edgespec.serving.ollama.model_card import version
from edgespec.serving.ollama.response_builder import OllamaBuilder
from edgespec.serving.page import PAGE, Page
from edgespec.serving.pulling import (
    LINES,
    AskedModel,
    Puller,
    as_line,
    asked_model,
    present,
    pull_response,
)
from edgespec.serving.request_bodies import BodyReceiver, RequestBody
from edgespec.serving.request_handler import failure_at, refusing, until_disconnected

_SIGN_OF_LIFE_S = 10.0
_DONE_WITH = (b"content-encoding", b"origin", b"sec-fetch-site")
_OLLAMA_STREAMS = ("/api/chat", "/api/generate")


class ModelRouter:
    """The ASGI application; see `Application`.

    Args:
        models: the first one answers requests that name none.
        responses: where those of the Responses API are kept.
        pull: downloads a model of a name, and adds it to the others; None if clients may not do that.
    """

    def __init__(
        self,
        models: LoadedModels,
        limits: Limits,
        responses: ResponseStore,
        *,
        api_key: str | None = None,
        hosts: list[str] | None = None,
        cors: str | None = None,
        pull: Callable[[str, Progress], None] | None = None,
    ) -> None:
        self._models = models
        self._puller = None if pull is None else Puller(pull)
        self._limits = limits
        self._bodies = BodyReceiver(limits)
        self._opening = asyncio.Lock()
        self._stopping = False
        self._started = int(time.time())
        forward, describe = _Forward(self), refusing(self._describe)
        routes = [
            *(Route(path, forward, methods=[method]) for method in ANSWERED for path in ANSWERED[method]),
            *(Route(path, describe, methods=["GET"]) for path in ("/props", "/slots")),
            *routes_to_kept(responses, limits, self._bodies),
            Route("/api/pull", refusing(self._pull), methods=["POST"]),
            *unsupported_routes(),
            Route("/v1/models", self._list),
            Route("/v1/models/{model:path}", refusing(self._show)),
            Route("/api/tags", self._tags),
            Route("/api/ps", self._loaded),
            Route("/api/show", describe, methods=["POST"]),
            Route("/api/version", _version),
            Route("/version", _version),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route(PAGE, Page().answer),
        ]
        self._app, self._batches = guarded(
            routes, limits, self._bodies, api_key=api_key, hosts=hosts, cors=cors
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def is_busy(self) -> bool:
        """True while requests are being answered, or wait."""
        return any(model.users for model in self._models.models)

    def drain(self) -> None:
        """Refuse requests that arrive from now on; called on the event loop, as is `stop`."""
        self._stopping = True
        self._batches.stop()
        self._bodies.close()
        for app in self._open():
            app.drain()

    def stop(self) -> None:
        """Refuse new requests, and end the others."""
        self._stopping = True
        self._batches.stop()
        if self._puller is not None:
            self._puller.stop()
        self._models.stop()
        for app in self._open():
            app.stop()

    def close(self) -> None:
        """End everything and free the models; called when the server has ended."""
        for app in self._open():
            app.close()

    def _open(self) -> list[Application]:
        return [model.app for model in self._models.models if model.app is not None]

    @asynccontextmanager
    async def received(self, http: HTTPRequest) -> AsyncIterator[tuple[bytes, AskedModel]]:
        """The decoded body of a request, and what decides where it goes."""
        async with self._bodies.received(http) as body:
            yield await asyncio.to_thread(self._read, body, http)

    def _read(self, body: RequestBody, http: HTTPRequest) -> tuple[bytes, AskedModel]:
        content = bytes(body.decoded(self._limits.body))
        asked = asked_model(content, self._limits)
        if not asked.name_of_model:
            asked.model = http.query_params.get("model")
        return content, asked

    @asynccontextmanager
    async def answering(
        self, asked: AskedModel, until_gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[Application]:
        """The application of the model that was asked for, while that may be in memory."""
        model = self._models.named(asked.name_of_model)
        app = await self._application(model)
        async with self._models.turn(model, until_gone):
            yield app

    async def _application(self, model: OfferedModel) -> Application:
        async with self._opening:  # each model is set up once
            if self._stopping:
                raise ShuttingDown
            if model.app is None:
                model.app = await asyncio.to_thread(model.open, model)
            return model.app

    async def _describe(self, http: HTTPRequest) -> Response:
        """Have a model described by its own application, which does not load it."""
        async with self.received(http) as (content, asked):
            app = await self._application(self._models.named(asked.name_of_model))
        return _Passed(app, content)

    async def _set_up_all(self) -> None:
        """Set up the models that can be, so that lists say what their files do."""
        for model in self._models.models:
            with suppress(Refusal, EdgeSpecError):
                await self._application(model)

    async def _list(self, _http: HTTPRequest) -> Response:
        await self._set_up_all()
        data = [self._about(name, model) for model in self._models.models for name in model.listed]
        return JSONResponse({"object": "list", "data": data})

    async def _show(self, http: HTTPRequest) -> Response:
        name = http.path_params["model"]
        return JSONResponse(self._about(name, self._models.named(name)))

    def _about(self, name: str, model: OfferedModel) -> dict[str, Any]:
        known = model.app.about() if model.app is not None else {}
        about = protocol.model(name, model.names[0], self._started, **known)
        return {**about, "loaded": model.is_loaded}

    async def _tags(self, _http: HTTPRequest) -> Response:
        await self._set_up_all()
        return JSONResponse({"models": [one for model in self._models.models for one in _tags_of(model)]})

    async def _loaded(self, _http: HTTPRequest) -> Response:
        running = [
            one
            for model in self._models.models
            if model.app is not None and model.is_loaded
            for one in model.app.handler.worker.card.running(model.names[0])["models"]
        ]
        return JSONResponse({"models": running})

    async def _pull(self, http: HTTPRequest) -> Response:
        """Say that a model is here, as programs ask before they use it, or download it."""
        async with self.received(http) as (_, asked):
            name = asked.name_of_model
        if not name:
            raise Refusal(400, "The request names no model.")
        if self._puller is None or self._models.offers(name):
            self._models.named(name)
            return await pull_response(present(), asked)
        return await pull_response(self._puller.steps(name), asked)

    async def _health(self, _http: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _metrics(self, _http: HTTPRequest) -> Response:
        registry = CollectorRegistry()
        registry.register(_MetricsOfAll(self._models))
        page = await asyncio.to_thread(partial(generate_latest, registry))
        return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


class _Passed(Response):
    """The response of another application to a request whose body was read already."""

    def __init__(self, app: Application, content: bytes) -> None:
        super().__init__()
        self._to, self._content = app, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._to(_forwarded(scope), _Replayed(self._content, receive), send)


class _Forward:
    """The application at the paths that models answer: the one that a request names answers it."""

    def __init__(self, router: ModelRouter) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = PatientSender(scope, send)
        try:
            async with self._router.received(HTTPRequest(scope, receive)) as (content, asked):
                sender.expect(asked)
                gone = partial(until_disconnected, receive)
                async with sender.signs_of_life(), self._router.answering(asked, gone) as app:
                    await app(_forwarded(scope), _Replayed(content, receive), sender)
        except ClientDisconnect:
            pass
        except Exception as error:
            refusal = logged_refusal(error)
            await refusal.response(failure_at(scope["path"], refusal))(scope, receive, sender)


def _forwarded(scope: Scope) -> Scope:
    """A request whose body was decoded, and whose origin was checked."""
    kept = [(name, value) for name, value in scope["headers"] if name not in _DONE_WITH]
    return {**scope, "headers": kept}


class _Replayed:
    """The receiving side of a request whose body was read already."""

    def __init__(self, content: bytes, receive: Receive) -> None:
        self._content: bytes | None = content
        self._receive = receive

    async def __call__(self) -> Message:
        if self._content is None:
            return await self._receive()
        body, self._content = self._content, None
        return {"type": "http.request", "body": body, "more_body": False}


class PatientSender:
    """The sending side of a request, which begins a stream by itself if its model keeps it waiting.

    Server-sent events have comments for that, and Ollama's streams lines without text. What goes wrong then
    is an event or a line.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._sign: Callable[[], bytes] | None = None  # of life
        self._media_type = ""
        self._error = b"%s"
        self._begun = self._began_early = self._failed = False

    def expect(self, asked: AskedModel) -> None:
        """Begin streams early if such a request has one."""
        path = self._scope["path"]
        if path in _OLLAMA_STREAMS and asked.stream is not False:
            builder = OllamaBuilder(model=asked.name_of_model, chat=path == "/api/chat")
            self._sign = lambda: as_line(builder.nothing_yet())
            self._media_type, self._error = LINES, b"%s\n"
        elif path.startswith("/v1/") and asked.stream is True:
            self._sign = lambda: b": waiting for the model\n\n"
            self._media_type = "text/event-stream; charset=utf-8"
            # Anthropic's clients skip events without a name.
            self._error = b"event: error\ndata: %s\n\n" if path == "/v1/messages" else b"data: %s\n\n"

    async def __call__(self, message: Message) -> None:
        if not self._began_early:
            self._begun = True
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._begun, self._failed = True, message["status"] >= 400
        elif self._failed:
            await self._send({**message, "body": self._error % message.get("body", b"")})
        else:
            await self._send(message)

    @asynccontextmanager
    async def signs_of_life(self) -> AsyncIterator[None]:
        """A block in which the client hears from its stream until its answer begins."""
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    async def _tick(self) -> None:
        if self._sign is None:
            return
        while True:
            await asyncio.sleep(_SIGN_OF_LIFE_S)
            if self._begun:
                return
            if not self._began_early:
                self._began_early = True
                headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-cache")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": self._sign(), "more_body": True})


class _MetricsOfAll(Collector):
    """The figures of all models, each with its name as a label."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for model in self._models.models:
            if model.app is None:
                continue
            for metric in model.app.handler.worker.metrics.registry.collect():
                into = merged.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                for sample in metric.samples:
                    labels = {**sample.labels, "model": model.names[0]}
                    into.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
        yield from merged.values()


def _tags_of(model: OfferedModel) -> list[dict[str, Any]]:
    """The model under all its names, as Ollama's clients list it; without details until it is used."""
    if model.app is not None:
        return list(model.app.handler.worker.card.tags(model.listed)["models"])
    return [{"name": name, "model": name, "size": model.needs} for name in model.listed]


async def _version(_http: HTTPRequest) -> Response:
    return JSONResponse(version())
