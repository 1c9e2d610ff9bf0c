"""Web pages that may use the server, with an application that only greets."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from edgespec.api.limits import Limits
from edgespec.api.response_store import ResponseStore
from edgespec.errors import UsageError
from edgespec.serving.loaded_models import LoadedModels, OfferedModel
from edgespec.serving.model_router import ModelRouter
from edgespec.serving.origins import HostCheck, checked_origin, origin_checks

OURS = "https://ours.example"


def ask(
    checks: str | list[Middleware] | None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer, with checks or those for an origin that is allowed."""

    middleware = checks if isinstance(checks, list) else origin_checks(checks)
    return ask_app(Starlette(routes=[Route("/", greet)], middleware=middleware), "/", method, **headers)


async def greet(_http: Any) -> PlainTextResponse:
    return PlainTextResponse("hello")


def ask_app(app: ASGIApp, path: str, method: str, **headers: str) -> tuple[int, dict[str, str]]:
    sent: list[Message] = []
    bodies = [b"{}"]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()  # this client does not disconnect
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    fields = {"host": "127.0.0.1:8080"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("NAS.local", 200),
        ("nas.local:5000", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("nas.local.evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_hosts(host: str, status: int) -> None:
    checks = [Middleware(HostCheck, allowed=["localhost", "::1", "Nas.local:5000"])]
    assert ask(checks, host=host)[0] == status


def test_other_programs_and_the_own_page_are_served() -> None:
    assert ask(None)[0] == 200
    status, headers = ask(None, origin="http://127.0.0.1:8080")
    assert status == 200
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9090"])
def test_other_pages_are_refused(origin: str) -> None:
    assert ask(None, origin=origin)[0] == 403
    assert ask(OURS, origin=origin)[0] == 403
    assert ask(None, "OPTIONS", origin=origin, access_control_request_method="POST")[0] == 403


def test_a_form_of_another_site_is_refused() -> None:
    """Browsers that leave out the Origin header say it thus."""
    assert ask(None, "POST", sec_fetch_site="cross-site")[0] == 403
    assert ask(None, "POST", sec_fetch_site="same-origin")[0] == 405, "passed on"


def test_the_origin_that_is_allowed_is_told_so() -> None:
    assert ask(OURS, origin=OURS)[1]["access-control-allow-origin"] == OURS
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    status, headers = ask(OURS, "OPTIONS", origin=OURS, **asked)
    assert (status, headers["access-control-allow-origin"]) == (200, OURS)
    assert ask("*", origin="https://any.example")[1]["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("POST", "/api/show"), ("GET", "/props")]
)
def test_the_origin_that_is_allowed_reaches_each_of_several_models(method: str, path: str) -> None:
    one: Any = Starlette(routes=[Route(path, greet, methods=[method])], middleware=origin_checks(None))
    models = LoadedModels([OfferedModel(("one",), 1, lambda _: one)], 10, waiting=1)
    router = ModelRouter(models, Limits(), ResponseStore(), cors=OURS)
    status, headers = ask_app(router, path, method, origin=OURS, sec_fetch_site="cross-site")
    assert (status, headers["access-control-allow-origin"]) == (200, OURS)
    assert ask_app(router, path, method, origin="https://evil.example")[0] == 403


def test_the_origin_that_is_allowed_may_remove_what_it_stored() -> None:
    assert ask(OURS, "OPTIONS", origin=OURS, access_control_request_method="DELETE")[0] == 200


@pytest.mark.parametrize(
    "asked",
    [
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count",
        "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key",
    ],
)
@pytest.mark.parametrize("cors", [OURS, "*"])
def test_browsers_may_use_the_official_sdks(cors: str, asked: str) -> None:
    preflight = {"access_control_request_method": "POST", "access_control_request_headers": asked}
    status, headers = ask(cors, "OPTIONS", origin=OURS, **preflight)
    assert (status, headers["access-control-allow-headers"]) == (200, asked)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("https://Ours.example/", OURS),
        ("https://ours.example:443", OURS),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("*", "*"),
    ],
)
def test_origins_are_taken_as_browsers_write_them(given: str, taken: str) -> None:
    assert checked_origin(given) == taken


@pytest.mark.parametrize(
    "given",
    [
        *("ours.example", "https://", "https://ours.example/page", "ftp://x", "http://[x", "http://a:99999"),
        *("https://a?b", "https://me@a", "", "https://a//"),
    ],
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--cors must be an origin"):
        checked_origin(given)
