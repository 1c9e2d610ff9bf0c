"""Request bodies: received within limits, and measured before they are parsed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.api.limits import Limits
from edgespec.api.refusals import RETRY_S, Refusal

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class RequestBody:
    """A received body.

    Attributes:
        content: its bytes.
        counted: how many of them count towards the total.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self.counted = 0


class BodyReceiver:
    """Receives bodies, and bounds what all of them take together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0  # bytes, without the part of each body that does not count

    @asynccontextmanager
    async def received(self, http: HTTPRequest) -> AsyncIterator[RequestBody]:
        """The whole body, which counts towards the total until it is dropped or the block is left.

        Raises:
            Refusal: it is too large or too slow, or too many bodies are being received.
            ClientDisconnect: the client disconnected before it had sent all of it.
        """
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limits.body:
            raise self._too_large()
        body = RequestBody()
        try:
            try:
                await asyncio.wait_for(self._collect(http, body), self._limits.body_s)
            except TimeoutError:
                text = f"The body did not arrive within {self._limits.body_s:g} seconds."
                raise Refusal(408, text, "request_timeout") from None
            yield body
        finally:
            self.drop(body)

    def drop(self, body: RequestBody) -> None:
        """Free the body, which is no longer needed."""
        body.content = bytearray()
        self._count(body)

    async def _collect(self, http: HTTPRequest, body: RequestBody) -> None:
        async for piece in http.stream():
            body.content += piece
            self._count(body)
            if len(body.content) > self._limits.body:
                raise self._too_large()
            if self._held > self._limits.all_bodies:
                text = f"Other clients are sending too much at the moment. Try again in {RETRY_S} seconds."
                raise Refusal(503, text, "too_many_bodies", retry=True)

    def _count(self, body: RequestBody) -> None:
        counted = max(0, len(body.content) - self._limits.small_body)
        self._held += counted - body.counted
        body.counted = counted

    def _too_large(self) -> Refusal:
        text = f"The body has more than {self._limits.body:,} bytes. The server's --max-body sets this limit."
        return Refusal(413, text, "request_too_large")


class RestOfBody:
    """Receives and drops the rest of a body that is answered before all of it has arrived.

    Many clients read the answer only after they have sent everything, and closing the connection while data
    arrives would discard the answer on its way. So the answer is sent at once, and is completed when the rest
    has arrived or its time is over.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of the application."""
        arrived = not {b"content-length", b"transfer-encoding"} & {name for name, _ in scope["headers"]}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.body_s + self._limits.linger_s

        async def receive_noted() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = arrived or not message.get("more_body", False)  # a disconnect has no body
            return message

        async def drop_rest() -> None:
            while not arrived:
                await receive_noted()

        async def send_noted(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not ends or arrived:
                await send(message)
                return
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                await asyncio.wait_for(drop_rest(), deadline - loop.time())
            await send({"type": "http.response.body"})

        await self._app(scope, receive_noted, send_noted)


def parse(body: bytes | bytearray, *, values: int, depth: int) -> object:
    """The JSON in a body.

    Values are counted first, without parsing: a parsed value may take fifty times the bytes of its text, and
    deep nesting exhausts the parser's stack.

    Args:
        values: most values in it.
        depth: deepest nesting of objects and lists.

    Raises:
        Refusal: it is not JSON, or exceeds a limit.
    """
    _check_structure(body, values, depth)
    try:
        value = json.loads(body.decode("utf-8-sig"))
        return _without_halves(value) if _HALF.search(body) else value
    except UnicodeDecodeError as error:
        raise Refusal(400, "The body is not UTF-8. Send JSON in UTF-8.") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise Refusal(400, f"The body is not valid JSON: {error.msg} ({place}).") from error
    except ValueError as error:  # what Python refuses besides
        raise Refusal(400, "A number in the body has too many digits.") from error
    except RecursionError as error:
        raise Refusal(400, "The body is nested too deep.") from error


def _check_structure(body: bytes | bytearray, values: int, depth: int) -> None:
    """Check the limits of `parse`; a function, so that its copies of the body are gone when that parses."""
    # Without escapes, every quote begins or ends a string, and every second part is outside of strings.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    parts = plain.count(b'"')
    if parts <= 4 * values:  # a key and a value have two quotes each
        structure = b"".join(plain.split(b'"')[::2])
        parts = structure.count(b",") + structure.count(b"{") + structure.count(b"[")
        if parts <= values:
            _check_depth(structure.translate(None, _NOT_BRACKETS), depth)
    if parts > values:
        raise Refusal(400, f"The body holds more than {values:,} values.")


def _without_halves(value: Any) -> Any:
    """A value without halves of surrogate pairs, which JSON permits and no text can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_halves(item) for item in value]
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(item) for key, item in value.items()}
    return value


def _check_depth(brackets: bytes, most: int) -> None:
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > most:
            raise Refusal(400, f"The body is nested more than {most} levels deep.")
