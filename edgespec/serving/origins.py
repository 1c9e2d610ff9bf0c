"""The web pages that may send requests: the server's own, and those of one more origin if asked for.

Requests are also checked for the name by which they reach the server, as a web page elsewhere can give this
machine a name of its own (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.api.refusals import Refusal
from edgespec.errors import UsageError

ANY = "*"
_PORTS = {"http": 80, "https": 443}


def origin_checks(cors: str | None) -> list[Middleware]:
    """Return the checks of requests' origins, and answers to preflights of the origin that is allowed."""
    checks = [Middleware(OriginCheck, allowed=cors)]
    if cors is not None:
        # Any header: the SDKs of OpenAI and Anthropic send many, and more with each version.
        checks.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[cors],
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=[ANY],
            )
        )
    return checks


class HostCheck:
    """Rejects requests with a Host header of another name, so that a web page cannot reach the server by one.

    Args:
        allowed: names and addresses, those of IPv6 without brackets; ports are ignored.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = {name.lower() for name in allowed} | {*map(_name_of, allowed)} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, port = scope.get("server") or (None, 0)
        if scope["type"] == "http" and port is not None:  # no web page reaches a Unix socket
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if any(_name_of(host) not in self._allowed for host in hosts or [""]):
                name = ", ".join(map(_name_of, hosts))
                text = f"Host {name!r} is not allowed. Start the server with --allow-host {name or 'NAME'}."
                await Refusal(403, text, "host_not_allowed").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """The name in a Host header, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class OriginCheck:
    """Rejects requests of web pages elsewhere. Other programs send no Origin header.

    Browsers send one with every request that a page makes, and with every form that it posts. Those that do
    not say in Sec-Fetch-Site that a request is from elsewhere. So a body may be of any type: many programs
    send JSON without saying so.
    """

    def __init__(self, app: ASGIApp, allowed: str | None) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """The reason why the request is refused; None if it is not."""
        found: dict[bytes, list[str]] = {b"origin": [], b"host": [], b"sec-fetch-site": []}
        for name, value in scope["headers"]:
            if name in found:
                found[name].append(value.decode("latin-1"))
        if len(found[b"origin"]) > 1:
            return Refusal(400, "The request has several Origin headers. Send one.")
        [origin] = found[b"origin"] or [""]
        if not origin and scope["method"] == "POST" and "cross-site" in found[b"sec-fetch-site"]:
            origin = "null"
        if not origin or self._allowed in (ANY, origin):
            return None
        own = [f"{scope.get('scheme', 'http')}://{host}" for host in found[b"host"]]
        if _parts(origin) is not None and [_parts(origin)] == [_parts(address) for address in own]:
            return None
        text = f"Origin {origin} is not allowed."
        if origin != "null":  # of files and sandboxes, which --cors cannot name
            text += f" Start the server with --cors {origin}."
        return Refusal(403, text, "origin_not_allowed")


def _parts(origin: str) -> tuple[str, str, int] | None:
    """Scheme, host and port of an origin, which is the same if they are; None if it is no origin."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
        return None
    return parts.scheme, parts.hostname, _PORTS[parts.scheme] if port is None else port


def checked_origin(origin: str) -> str:
    """The value of --cors as browsers write it."""
    parts = _parts(origin)
    if origin == ANY:
        return origin
    if parts is None or origin.count("/") - origin.endswith("/") != 2 or {*"?#"} & {*origin}:
        raise UsageError(f"--cors must be an origin such as https://example.com, or *, not {origin}.")
    scheme, name, port = parts
    host = f"[{name}]" if ":" in name else name
    return f"{scheme}://{host}" if port == _PORTS[scheme] else f"{scheme}://{host}:{port}"
