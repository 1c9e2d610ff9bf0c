"""Request bodies: received within limits, and measured before they are parsed."""

from __future__ import annotations

import asyncio
import json
import math
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request as HTTPRequest

from edgespec.api.limits import Limits
from edgespec.api.refusals import RETRY_S, Refusal, ShuttingDown

_GZIP = 31  # as zlib's window bits
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class RequestBody:
    """A received body.

    Attributes:
        content: its bytes, as they were sent.
        encoding: how they were compressed, in the words of HTTP; empty for not at all.
        counted: how many of them count towards the total.
    """

    def __init__(self, encoding: str = "") -> None:
        self.content = bytearray()
        self.encoding = encoding
        self.counted = 0

    def decoded(self, most: int) -> bytes | bytearray:
        """The content without compression; called in a thread, as that takes time.

        Args:
            most: bytes of it.

        Raises:
            Refusal: there are more, the compression is unknown, or the bytes are damaged.
        """
        if self.encoding in ("", "identity"):
            return self.content
        if self.encoding not in ("gzip", "x-gzip"):
            text = f"Content-Encoding {self.encoding!r} is not supported. Send gzip, or no compression."
            raise Refusal(415, text, "unsupported_encoding")
        stream = zlib.decompressobj(_GZIP)
        try:
            content = stream.decompress(self.content, most + 1)
        except zlib.error as error:
            raise Refusal(400, f"The body is not valid gzip: {error}.", "invalid_encoding") from error
        if len(content) > most:
            raise _too_large(most)
        if not stream.eof or stream.unused_data:
            raise Refusal(400, "The body is not one whole gzip stream.", "invalid_encoding")
        return content


class BodyReceiver:
    """Receives bodies, and bounds what all of them take together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0  # bytes, without the part of each body that does not count
        self._is_closed = False
        self._deadlines: set[asyncio.Timeout] = set()

    def close(self) -> None:
        """Refuse bodies that arrive from now on; called on the event loop."""
        self._is_closed = True
        for deadline in self._deadlines:
            deadline.reschedule(0)

    @asynccontextmanager
    async def received(self, http: HTTPRequest) -> AsyncIterator[RequestBody]:
        """The whole body, which counts towards the total until it is dropped or the block is left.

        Raises:
            Refusal: it is too large or too slow, too many bodies are being received, or no more are.
            ClientDisconnect: the client disconnected before it had sent all of it.
        """
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limits.body:
            raise _too_large(self._limits.body)
        body = RequestBody(http.headers.get("content-encoding", "").strip().lower())
        try:
            async with self._timed():
                await self._collect(http, body)
            yield body
        finally:
            self.drop(body)

    def drop(self, body: RequestBody) -> None:
        """Free the body, which is no longer needed."""
        body.content = bytearray()
        self._count(body)

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        """End this block with a Refusal if it takes too long, or if no more bodies are received."""
        try:
            async with asyncio.timeout(self._limits.body_s) as deadline:
                self._deadlines.add(deadline)
                yield
        except TimeoutError:
            if not self._is_closed:
                text = f"The body did not arrive within {self._limits.body_s:g} seconds."
                raise Refusal(408, text, "request_timeout") from None
        finally:
            self._deadlines.discard(deadline)
        if self._is_closed:
            raise ShuttingDown

    async def _collect(self, http: HTTPRequest, body: RequestBody) -> None:
        async for piece in http.stream():
            body.content += piece
            self._count(body)
            if len(body.content) > self._limits.body:
                raise _too_large(self._limits.body)
            if self._held > self._limits.all_bodies:
                text = f"Other clients are sending too much at the moment. Try again in {RETRY_S} seconds."
                raise Refusal(503, text, "too_many_bodies", retry=True)

    def _count(self, body: RequestBody) -> None:
        counted = max(0, len(body.content) - self._limits.small_body)
        self._held += counted - body.counted
        body.counted = counted


def _too_large(most: int) -> Refusal:
    text = f"The body has more than {most:,} bytes. The server's --max-body sets this limit."
    return Refusal(413, text, "request_too_large")


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
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_not_a_number, parse_float=_finite)
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


def _not_a_number(word: str) -> Any:
    raise Refusal(400, f"{word} in the body is not JSON.")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise Refusal(400, "A number in the body is too large.")
    return number


def _check_structure(body: bytes | bytearray, values: int, depth: int) -> None:
    """Check the limits of `parse`; a function, so that its copies of the body are gone when that parses."""
    # Without escapes, every quote begins or ends a string, and every second part is outside of strings.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    parts = plain.count(b'"')
    if parts <= 4 * values:  # a key and a value have two quotes each
        structure = b"".join(plain.split(b'"')[::2])
        opened = structure.count(b"{") + structure.count(b"[")
        if structure.count(b"}") + structure.count(b"]") > opened:
            raise Refusal(400, "The body is not valid JSON: it closes more brackets than it opens.")
        parts = structure.count(b",") + opened
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
