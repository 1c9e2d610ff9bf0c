"""The HTTP application: its routes, and access to them."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.generation.config import GenerationConfig
from edgespec.serving.answering import Answering, Kind, Reply
from edgespec.serving.api import protocol
from edgespec.serving.api.limits import Limits
from edgespec.serving.api.refusals import Refusal, refusal_for
from edgespec.serving.origins import origin_checks
from edgespec.serving.page import PAGE, Page
from edgespec.serving.request_log import Entry
from edgespec.serving.worker import Worker


class Application:
    """The ASGI application.

    Args:
        model: the name it answers to.
        aliases: other names that it answers to.
        defaults: settings for what requests leave open.
        api_key: what clients must send as a bearer token; None requires none.
        hosts: accepted names in the Host header, so that a web page cannot reach a server on this machine
            through a name of its own (DNS rebinding); None accepts all.
        limits: bounds on requests.
        cors: the origin of web pages elsewhere that may send requests; "*" is any, None is none.
        on_request: called with an entry for the log when a request is done.
        system: the system prompt of conversations that have none; None leaves them without.
    """

    def __init__(
        self,
        worker: Worker,
        model: str,
        defaults: GenerationConfig,
        *,
        api_key: str | None = None,
        hosts: list[str] | None = None,
        limits: Limits | None = None,
        cors: str | None = None,
        aliases: Sequence[str] = (),
        on_request: Callable[[Entry], None] | None = None,
        system: str | None = None,
    ) -> None:
        self._worker = worker
        self._names = (model, *aliases)
        self._open = api_key is None
        self._started = int(time.time())
        self._answering = Answering(
            worker, model, defaults, limits or Limits(), aliases=aliases, on_request=on_request, system=system
        )
        routes = [
            Route("/v1/chat/completions", _Completions(self._answering, "chat"), methods=["POST"]),
            Route("/v1/completions", _Completions(self._answering, "text"), methods=["POST"]),
            Route("/v1/responses", _Completions(self._answering, "response"), methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._show_model),
            Route("/health", self._health),
            Route(PAGE, Page().answer),
            Route("/metrics", self._metrics),
        ]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
        middleware += origin_checks(cors)
        if api_key is not None:
            middleware.append(Middleware(_RequireKey, api_key=api_key))
        refuse = _NoSuchRoute(routes)
        handlers: dict[Any, Any] = {404: refuse, 405: refuse, 500: _bug}
        self._app: ASGIApp = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def stop(self) -> None:
        """End all answers; called on the event loop before the server waits for its clients."""
        self._answering.stop()

    async def _list_models(self, _http: HTTPRequest) -> Response:
        return JSONResponse(protocol.models(self._names, self._started))

    async def _show_model(self, http: HTTPRequest) -> Response:
        name = http.path_params["model"]
        if name not in self._names:
            return Refusal(404, f"This server runs {self._names[0]!r}.", "model_not_found").response()
        return JSONResponse(protocol.model(name, self._started))

    async def _health(self, _http: HTTPRequest) -> Response:
        trouble = self._worker.trouble
        if not trouble:
            return JSONResponse({"status": "ok"})
        # The reason may name files, and no key is needed to see this page.
        reason = trouble if self._open else "The model failed; the server's output says why."
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    async def _metrics(self, _http: HTTPRequest) -> Response:
        page, content_type = self._worker.metrics.page()
        return Response(page, headers={"content-type": content_type})


class _Completions:
    """An endpoint that answers completions."""

    def __init__(self, answering: Answering, kind: Kind) -> None:
        self._answering = answering
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answering.answer(Reply(scope, receive, send), self._kind)


class _RequireKey:
    """Rejects requests without the key, but for /health and the page, which hold no secrets."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/health", PAGE):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                refusal = Refusal(401, "The API key is missing or wrong.", "invalid_api_key")
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _NoSuchRoute:
    """Answers requests for what is not served with the routes that are."""

    def __init__(self, routes: Sequence[Route]) -> None:
        served = [("POST" if "POST" in (route.methods or ()) else "GET", route.path) for route in routes]
        self._routes = ", ".join(f"{method} {path}" for method, path in served).replace(":path}", "}")

    async def __call__(self, http: HTTPRequest, error: Any) -> Response:
        text = f"Not supported: {http.method} {http.url.path}; routes: {self._routes}."
        response = Refusal(error.status_code, text, "no_such_route").response()
        response.headers.update(error.headers or {})
        return response


async def _bug(_http: HTTPRequest, error: Exception) -> Response:
    return refusal_for(error).response()
