"""Which web pages may send requests: the server's own, and those of one more origin if that was asked for."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.errors import UsageError
from edgespec.serving.api.refusals import Refusal

ANY = "*"


def origin_checks(cors: str | None) -> list[Middleware]:
    """What checks where requests come from, and answers preflights of the origin that is allowed."""
    checks = [Middleware(SameOrigin, allowed=cors)]
    if cors is not None:
        headers = ["authorization", "content-type"]
        checks.append(
            Middleware(
                CORSMiddleware, allow_origins=[cors], allow_methods=["GET", "POST"], allow_headers=headers
            )
        )
    return checks


class SameOrigin:
    """Rejects requests of web pages elsewhere. Other programs send no Origin header."""

    def __init__(self, app: ASGIApp, allowed: str | None) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            origin = headers.get(b"origin", b"").decode("latin-1")
            host = headers.get(b"host", b"").decode("latin-1")
            if origin and self._allowed not in (ANY, origin) and urlsplit(origin).netloc != host:
                text = f"Web pages of {origin} may not use this server; serve --cors {origin} allows it."
                await Refusal(403, text, "origin_not_allowed").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def checked_origin(origin: str) -> str:
    """The value of --cors as browsers write it.

    Raises:
        UsageError: it is neither an origin nor *.
    """
    parts = urlsplit(origin)
    if origin != ANY and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/")):
        raise UsageError(f"--cors is {origin}.", "It must be like https://example.com, or *.")
    return origin if origin == ANY else f"{parts.scheme}://{parts.netloc}".lower()
