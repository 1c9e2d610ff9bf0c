"""Serves several models: each has an application of its own, and the name in a request chooses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
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
from edgespec.api.endpoint import json_line
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal, ShuttingDown, logged_refusal
from edgespec.api.response_store import ResponseStore
from edgespec.serving.app import (
    ANSWERED,
    Application,
    failure_at,
    guarded,
    unsupported_routes,
)
from edgespec.serving.kept import routes_to_kept
from edgespec.serving.loaded_models import LoadedModels, OfferedModel
from edgespec.serving.ollama.model_card import version
from edgespec.serving.page import PAGE, Page
from edgespec.serving.request_bodies import BodyReceiver, RequestBody
from edgespec.serving.request_handler import until_disconnected

_SIGN_OF_LIFE_S = 10.0
_COMMENT = b": waiting for the model\n\n"
_LINES = "application/x-ndjson"
_EVENTS = b"text/event-stream; charset=utf-8"


class _Asked(msgspec.Struct):
    """What decides where a request goes."""

    model: Any = None
    name: Any = None  # the model, in older clients of Ollama
    stream: Any = None

    @property
    def name_of_model(self) -> str:
        """The name of the model; empty if it has none."""
        given = self.model or self.name
        return given if isinstance(given, str) else ""


class ModelRouter:
    """The ASGI application; see `Application`.

    Args:
        models: the first one answers requests that name none.
        responses: where those of the Responses API are kept.
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
    ) -> None:
        self._models = models
        self._limits = limits
        self._bodies = BodyReceiver(limits)
        self._opening = asyncio.Lock()
        self._stopping = False
        self._started = int(time.time())
        forward = _Forward(self)
        routes = [
            *(Route(path, forward, methods=[method]) for method in ANSWERED for path in ANSWERED[method]),
            *(Route(path, self._describe, methods=["GET"]) for path in ("/props", "/slots")),
            *routes_to_kept(responses, limits, self._bodies),
            Route("/api/pull", self._pull, methods=["POST"]),
            *unsupported_routes(),
            Route("/v1/models", self._list),
            Route("/v1/models/{model:path}", self._show),
            Route("/api/tags", self._tags),
            Route("/api/ps", self._loaded),
            Route("/api/show", self._describe, methods=["POST"]),
            Route("/api/version", _version),
            Route("/version", _version),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route(PAGE, Page().answer),
        ]
        self._app = guarded(routes, api_key=api_key, hosts=hosts, cors=cors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def is_busy(self) -> bool:
        """True while requests are being answered, or wait."""
        return any(model.users for model in self._models.models)

    def drain(self) -> None:
        """Refuse requests that arrive from now on; called on the event loop, as is `stop`."""
        self._stopping = True
        self._bodies.close()
        for app in self._open():
            app.drain()

    def stop(self) -> None:
        """Refuse new requests, and end the others."""
        self._stopping = True
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
    async def received(self, http: HTTPRequest) -> AsyncIterator[tuple[bytes, _Asked]]:
        """The decoded body of a request, and what decides where it goes."""
        async with self._bodies.received(http) as body:
            yield await asyncio.to_thread(self._read, body, http)

    def _read(self, body: RequestBody, http: HTTPRequest) -> tuple[bytes, _Asked]:
        content = bytes(body.decoded(self._limits.body))
        try:
            asked = msgspec.json.decode(content, type=_Asked) if content else _Asked()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            asked = _Asked()  # the application says what is wrong
        if not asked.name_of_model:
            asked.model = http.query_params.get("model")
        return content, asked

    @asynccontextmanager
    async def answering(
        self, asked: _Asked, until_gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[Application]:
        """The application of the model that was asked for, while that may be in memory."""
        model = self._models.named(asked.name_of_model)
        async with self._models.turn(model, until_gone):
            yield await self._application(model)

    async def _application(self, model: OfferedModel) -> Application:
        async with self._opening:  # each model is set up once
            if self._stopping:
                raise ShuttingDown
            if model.app is None:
                model.app = await asyncio.to_thread(model.open, model)
            return model.app

    async def _describe(self, http: HTTPRequest) -> Response:
        """Have a model described by its own application, which does not load it."""
        try:
            async with self.received(http) as (content, asked):
                app = await self._application(self._models.named(asked.name_of_model))
        except Refusal as refusal:
            return refusal.response(failure_at(http.url.path, refusal))
        return _Passed(app, content)

    async def _list(self, _http: HTTPRequest) -> Response:
        data = [self._about(name, model) for model in self._models.models for name in model.listed]
        return JSONResponse({"object": "list", "data": data})

    async def _show(self, http: HTTPRequest) -> Response:
        name = http.path_params["model"]
        try:
            return JSONResponse(self._about(name, self._models.named(name)))
        except Refusal as refusal:
            return refusal.response()

    def _about(self, name: str, model: OfferedModel) -> dict[str, Any]:
        card = model.app.handler.worker.card if model.app is not None else None
        context, sees = (0, False) if card is None else (card.context, card.sees)
        return {**protocol.model(name, self._started, context, sees=sees), "loaded": model.is_loaded}

    async def _tags(self, _http: HTTPRequest) -> Response:
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
        """Say that a model is here, as programs ask before they use it; none is downloaded."""
        try:
            async with self.received(http) as (_, asked):
                self._models.named(asked.name_of_model)
        except Refusal as refusal:
            return refusal.response(failure_at(http.url.path, refusal))
        line = json_line({"status": "success"})
        return Response(f"{line}\n" if asked.stream is not False else line, media_type=_LINES)

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
        await self._to(_without_encoding(scope), _Replayed(self._content, receive), send)


class _Forward:
    """The application at the paths that models answer: the one that a request names answers it."""

    def __init__(self, router: ModelRouter) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = PatientSender(scope, send)
        try:
            async with self._router.received(HTTPRequest(scope, receive)) as (content, asked):
                sender.may_wait = asked.stream is True
                gone = partial(until_disconnected, receive)
                async with sender.signs_of_life(), self._router.answering(asked, gone) as app:
                    await app(_without_encoding(scope), _Replayed(content, receive), sender)
        except ClientDisconnect:
            pass
        except Exception as error:
            refusal = logged_refusal(error)
            await refusal.response(failure_at(scope["path"], refusal))(scope, receive, sender)


def _without_encoding(scope: Scope) -> Scope:
    """A request whose body was decoded."""
    kept = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
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

    Only streams of server-sent events begin so, as these have comments. What goes wrong then is an event.

    Attributes:
        may_wait: whether a stream was asked for.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.may_wait = False
        self._scope = scope
        self._send = send
        self._begun = self._began_early = self._failed = False

    async def __call__(self, message: Message) -> None:
        if not self._began_early:
            self._begun = True
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._begun, self._failed = True, message["status"] >= 400
        elif self._failed:
            body = b"data: " + message.get("body", b"") + b"\n\n"
            await self._send({**message, "body": body})
        else:
            await self._send(message)

    @asynccontextmanager
    async def signs_of_life(self) -> AsyncIterator[None]:
        """A block in which the client gets comments until its answer begins."""
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    async def _tick(self) -> None:
        if not self.may_wait or not self._scope["path"].startswith("/v1/"):
            return
        while True:
            await asyncio.sleep(_SIGN_OF_LIFE_S)
            if self._begun:
                return
            if not self._began_early:
                self._began_early = True
                headers = [(b"content-type", _EVENTS), (b"cache-control", b"no-cache")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


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
