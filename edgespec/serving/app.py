"""The HTTP application: its routes, and access to them."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Collection, Sequence
from itertools import dropwhile
from typing import Any, Generic

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.api import protocol
from edgespec.api.completion_request import is_pattern, names_model
from edgespec.api.embeddings import EmbeddingEndpoint, OpenAIEmbeddings, Rerank
from edgespec.api.endpoint import DirectEndpoint, Endpoint
from edgespec.api.limits import Limits
from edgespec.api.openai_endpoints import CompletionsEndpoint, ResponsesEndpoint
from edgespec.api.refusals import Refusal, Unavailable, refusal_for
from edgespec.api.response_store import ResponseStore
from edgespec.api.tokenizing import detokenized, tokenized, tokenizer_info
from edgespec.models.gguf.embedding import no_embeddings
from edgespec.serving.anthropic.endpoints import MessagesEndpoint
from edgespec.serving.batches import Batches
from edgespec.serving.completion_handler import CompletionHandler
from edgespec.serving.embeddings import EmbeddingHandler
from edgespec.serving.kept import routes_to_kept
from edgespec.serving.keys import keys_in
from edgespec.serving.llamacpp import NativeEndpoint, properties, slots, with_template
from edgespec.serving.model_worker import ModelWorker
from edgespec.serving.ollama.embeddings import OllamaEmbed, OllamaEmbeddings
from edgespec.serving.ollama.endpoints import OllamaEndpoint, failure
from edgespec.serving.ollama.model_card import ModelCard, version
from edgespec.serving.origins import HostCheck, origin_checks
from edgespec.serving.page import PAGE, Page
from edgespec.serving.pulling import asked_model, present, pull_response
from edgespec.serving.request_bodies import BodyReceiver
from edgespec.serving.request_handler import (
    OLLAMA,
    EndpointT,
    Reply,
    RequestHandler,
    failure_at,
    refusing,
)
from edgespec.serving.response_sender import ResponseSender

# Paths of the Ollama API that manage models.
_UNSUPPORTED = ("pull", "push", "create", "copy", "delete", "blobs/{digest:path}")

_PROPERTIES = ("/props", "/slots")
ANY_METHOD = ["GET", "POST", "PUT", "DELETE"]


class Application:
    """The ASGI application.

    Args:
        api_key: what clients must send as a bearer token; None requires none.
        hosts: accepted names in the Host header, so that a web page cannot reach a server on this machine
            through a name of its own (DNS rebinding); None accepts all.
        cors: the origin of web pages elsewhere that may send requests; "*" is any, None is none.
        responses: where those of the Responses API are kept, which several models may share.

    Attributes:
        handler: of the requests that the model answers.
    """

    def __init__(
        self,
        handler: CompletionHandler | EmbeddingHandler,
        *,
        api_key: str | None = None,
        hosts: list[str] | None = None,
        cors: str | None = None,
        responses: ResponseStore | None = None,
    ) -> None:
        self.handler = handler
        self._worker: ModelWorker[Any, Any] = handler.worker
        self._names = handler.names
        self._open = api_key is None
        self._started = int(time.time())
        listed = [name for name in self._names if not is_pattern(name)]
        routes = [
            *_answering(handler, responses or ResponseStore()),
            Route("/api/pull", refusing(self._pull), methods=["POST"]),
            *unsupported_routes(),
            Route("/api/tags", self._describe(lambda card: card.tags(listed))),
            Route("/api/ps", self._describe(lambda card: card.running(listed[0], not self._worker.asleep))),
            Route("/api/show", self._describe(ModelCard.shown), methods=["POST"]),
            Route("/api/version", _version),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._show_model),
            Route("/health", self._health),
            Route("/version", _version),
            *(self._beside_answers() if isinstance(handler, CompletionHandler) else ()),
            Route("/metrics", self._metrics),
        ]
        self._app, self._batches = guarded(
            routes, handler.limits, handler.bodies, api_key=api_key, hosts=hosts, cors=cors
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def is_busy(self) -> bool:
        """True while requests are being answered, or wait."""
        return self._worker.is_busy

    def drain(self) -> None:
        """Refuse requests that arrive from now on; called on the event loop, as is `stop`."""
        self._batches.stop()
        self.handler.drain()

    def stop(self) -> None:
        """Refuse new requests, and end the others."""
        self._batches.stop()
        self.handler.stop()

    def close(self) -> None:
        """End everything and free the model."""
        self._worker.close()

    async def _list_models(self, _http: HTTPRequest) -> Response:
        names = [name for name in self._names if not is_pattern(name)]
        return JSONResponse(protocol.models(names, self._started, **self.about()))

    async def _show_model(self, http: HTTPRequest) -> Response:
        name = http.path_params["model"]
        if not names_model(name, self._names):
            text = f"There is no model {name!r}; this server runs {self._names[0]!r}."
            return Refusal(404, text, "model_not_found").response()
        return JSONResponse(protocol.model(name, self._names[0], self._started, **self.about()))

    def about(self) -> dict[str, Any]:
        """The description of the model, for `protocol.model`."""
        card = self._worker.card
        return {"context": card.context, "sees": card.sees, "writes": card.writes}

    def _beside_answers(self) -> list[Route]:
        """The page, and the routes that describe how prompts are answered."""
        return [Route(PAGE, Page().answer), *(Route(path, self._properties) for path in _PROPERTIES)]

    async def _properties(self, http: HTTPRequest) -> Response:
        card, most = self._worker.card, self._worker.parallel
        if http.url.path == "/props":
            return JSONResponse(properties(card, most))
        return JSONResponse(slots(card, most, self._worker.running))

    def _describe(self, describe: Callable[[ModelCard], dict[str, Any]]) -> Reply:
        """A handler that describes the model."""

        async def reply(_http: HTTPRequest) -> Response:
            if self._worker.failure:
                raise Unavailable(self._worker.failure)
            return JSONResponse(describe(self._worker.card))

        return refusing(reply)

    async def _pull(self, http: HTTPRequest) -> Response:
        """Say that the model is here, as programs ask before they use it."""
        async with self.handler.bodies.received(http) as body:
            limits = self.handler.limits
            asked = asked_model(body.decoded(limits.body), limits)
        if not asked.name_of_model:
            raise Refusal(400, "The request names no model.")
        if not names_model(asked.name_of_model, self._names):
            return await _refuse_unsupported(http)
        return await pull_response(present(), asked)

    async def _health(self, _http: HTTPRequest) -> Response:
        reason = self._worker.failure
        if not reason:
            return JSONResponse({"status": "ok"})
        # The reason may name files, and no key is needed to see this page.
        if not self._open:
            reason = "The model failed; the server's output says why."
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    async def _metrics(self, _http: HTTPRequest) -> Response:
        page, content_type = self._worker.metrics.page()
        return Response(page, headers={"content-type": content_type})


def _served_path(path: str, in_v1: Collection[str]) -> str:
    """The path that a request means: single slashes, none at the end, and one /v1 where it belongs.

    Args:
        in_v1: the names under /v1.
    """
    parts = [part for part in path.split("/") if part]
    rest = list(dropwhile("v1".__eq__, parts))
    if rest == ["health"]:
        return "/health"
    return "/" + "/".join(["v1", *rest] if rest and rest[0] in in_v1 else parts)


def guarded(
    routes: list[Route],
    limits: Limits,
    bodies: BodyReceiver,
    *,
    api_key: str | None,
    hosts: list[str] | None,
    cors: str | None,
) -> tuple[ASGIApp, Batches]:
    """An application with these routes that answers those who may ask, and its batches; see `Application`."""

    async def at_served_path(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = _served_path(scope["path"], in_v1)
        await app(scope, receive, send)

    batches = Batches(at_served_path, ANSWERED["POST"], limits, bodies)
    routes = [*routes, *batches.routes()]
    middleware = [Middleware(HostCheck, allowed=hosts)] if hosts else []
    middleware += origin_checks(cors)
    if api_key is not None:
        middleware.append(Middleware(_RequireKey, api_key=api_key))
    refuse = _NoSuchRoute(routes)
    handlers: dict[Any, Any] = {404: refuse, 405: refuse, 500: _bug}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    # The names under /v1: clients whose base URL lacks it, or has it twice, are served too.
    in_v1 = {route.path.split("/")[2] for route in routes if route.path.startswith("/v1/")}
    return at_served_path, batches


def _endpoints(model: str, responses: ResponseStore) -> dict[str, Endpoint]:
    """The paths that answer prompts."""
    return {
        "/v1/chat/completions": CompletionsEndpoint(chat=True),
        "/v1/completions": CompletionsEndpoint(chat=False),
        "/v1/responses": ResponsesEndpoint(responses),
        "/v1/messages": MessagesEndpoint(),
        "/v1/messages/count_tokens": MessagesEndpoint(counts=True),
        "/completion": NativeEndpoint(),
        "/infill": NativeEndpoint(infill=True),
        "/apply-template": DirectEndpoint(with_template),
        "/tokenize": DirectEndpoint(tokenized),
        "/detokenize": DirectEndpoint(detokenized),
        "/api/chat": OllamaEndpoint(chat=True, model=model),
        "/api/generate": OllamaEndpoint(chat=False, model=model),
    }


def _embedding_endpoints() -> dict[str, EmbeddingEndpoint]:
    """The paths that answer requests for embeddings."""
    return {
        "/v1/embeddings": OpenAIEmbeddings(),
        "/api/embed": OllamaEmbed(),
        "/api/embeddings": OllamaEmbeddings(),
        "/v1/rerank": Rerank(),
        "/v2/rerank": Rerank(),  # of Cohere's clients
    }


ANSWERED = {"POST": (*_endpoints("", ResponseStore()), *_embedding_endpoints()), "GET": ("/tokenizer_info",)}
"""The paths that models answer, by method."""


def unsupported_routes() -> list[Route]:
    """The routes of Ollama's API that manage models, which are refused."""
    return [Route(f"{OLLAMA}{name}", _refuse_unsupported, methods=ANY_METHOD) for name in _UNSUPPORTED]


def _answering(handler: CompletionHandler | EmbeddingHandler, responses: ResponseStore) -> list[Route]:
    """The routes that the model answers, and refusals at those that take a model of another kind."""
    model = handler.names[0]
    prompts, inputs = _endpoints(model, responses), _embedding_endpoints()
    if isinstance(handler, EmbeddingHandler):
        embeds = [_route(path, handler, endpoint) for path, endpoint in inputs.items()]
        text = f"{model} is an embedding model or a reranker, and writes no text."
        refuse = _Refuse(Refusal(404, f"{text} Use {' or '.join(inputs)}.", "embedding_model"))
        return embeds + [Route(path, refuse, methods=ANY_METHOD) for path in prompts]
    answers = [_route(path, handler, endpoint) for path, endpoint in prompts.items()]
    answers.append(Route("/tokenizer_info", _Answers(handler, DirectEndpoint(tokenizer_info))))
    refuse = _Refuse(Refusal(404, str(no_embeddings(model)), "no_embeddings"))
    answers += routes_to_kept(responses, handler.limits, handler.bodies)
    return answers + [Route(path, refuse, methods=ANY_METHOD) for path in inputs]


def _route(path: str, handler: RequestHandler[Any, EndpointT], endpoint: EndpointT) -> Route:
    return Route(path, _Answers(handler, endpoint), methods=["POST"])


class _Answers(Generic[EndpointT]):
    """The application at a path that the model answers."""

    def __init__(self, handler: RequestHandler[Any, EndpointT], endpoint: EndpointT) -> None:
        self._handler = handler
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = ResponseSender(self._endpoint.failure, scope, receive, send)
        await self._handler.answer(sender, self._endpoint)


class _Refuse:
    """The application at a path that is not served, and why."""

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._refusal.response(failure_at(scope["path"], self._refusal))
        await response(scope, receive, send)


class _RequireKey:
    """Rejects requests without the key, but for /health and the page, which hold no secrets."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/health", PAGE):
            # Clients may send several, such as one of another service in x-api-key.
            given = keys_in(scope)
            if not any(hmac.compare_digest(key, self._key) for key in given):
                text = "The API key is invalid." if any(given) else "The API key is missing."
                text += " Send it in the header 'Authorization: Bearer KEY', in x-api-key or in api-key."
                refusal = Refusal(401, text, "invalid_api_key")
                await refusal.response(failure_at(scope["path"], refusal))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _NoSuchRoute:
    """Answers requests for what is not served with the routes that are."""

    def __init__(self, routes: Sequence[Route]) -> None:
        served = [
            (next(m for m in ("POST", "DELETE", "GET") if m in (route.methods or ("GET",))), route.path)
            for route in routes
            if route.endpoint is not _refuse_unsupported and not isinstance(route.endpoint, _Refuse)
        ]
        self._routes = ", ".join(f"{method} {path}" for method, path in served).replace(":path}", "}")

    async def __call__(self, http: HTTPRequest, error: Any) -> Response:
        text = f"Not supported: {http.method} {http.url.path}; routes: {self._routes}."
        refusal = Refusal(error.status_code, text, "no_such_route")
        response = refusal.response(failure_at(http.url.path, refusal))
        response.headers.update(error.headers or {})
        return response


async def _refuse_unsupported(http: HTTPRequest) -> Response:
    text = f"Not supported: {http.method} {http.url.path}. This server does not manage models"
    text += "; started with --allow-pull, it downloads them." if http.url.path == "/api/pull" else "."
    refusal = Refusal(501, text)
    return refusal.response(failure(refusal))


async def _version(_http: HTTPRequest) -> Response:
    return JSONResponse(version())


async def _bug(http: HTTPRequest, error: Exception) -> Response:
    refusal = refusal_for(error)
    return refusal.response(failure_at(http.url.path, refusal))
