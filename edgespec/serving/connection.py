"""HTTP connections: uvicorn's, with a time limit on everything a client may stall.

A client that has sent its request may close its sending side and wait for the answer. On the wire that looks
like a client that has left: both send an end of file. They differ once something is sent to them, because the
system of a client that has left answers with a reset. So after an end of file, and until its answer begins,
the client is sent interim responses (100 Continue), which every HTTP/1.1 client skips.

A request whose length is stated twice, or in two ways, is refused: a proxy in front may take another part of
what it passes on for the next request (RFC 9112, 11.2).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from edgespec.api.limits import Limits
from edgespec.api.refusals import RETRY_S, Refusal
from edgespec.serving.response_sender import HALF_CLOSED, REFUSED

_POLL_S = 0.1
_POLLS_PER_PROBE = 10
_STATED_LENGTH = re.compile(rb"^content-length:([^\n]*)", re.IGNORECASE | re.MULTILINE)


def connection_type(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol for uvicorn, with these limits."""

    class LimitedConnection(HTTPConnection):
        _limits = limits

    return LimitedConnection


class HTTPConnection(H11Protocol):
    """A connection that closes when its client stalls."""

    _limits = Limits()
    conn: _StrictHTTP

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._half_closed = asyncio.Event()
        super().__init__(config, server_state, {**app_state, HALF_CLOSED: self._half_closed}, _loop)
        self.conn = _StrictHTTP(h11.SERVER)
        self._is_refused = False
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._polls = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            text = f"Too many connections are open. Try again in {RETRY_S} seconds."
            self._refuse(Refusal(503, text, "too_many_connections", retry=True))
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._time_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, unless another answer has begun; nothing more is read from this client."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        refusal = Refusal(400, f"The request is not valid HTTP: {self.conn.fault or msg}.", "invalid_http")
        if cycle is not None and not cycle.response_complete:
            cycle.scope["state"][REFUSED] = refusal
            cycle.disconnected = True
            cycle.message_event.set()
        self._write(refusal)
        # Closing at once would discard the reply if more of the request arrives.
        self.transport.write_eof()
        self.loop.call_later(self._limits.linger_s, self.transport.abort)

    def eof_received(self) -> bool:  # type: ignore[override]
        cycle = self.cycle
        waits = cycle is not None and not cycle.more_body and not cycle.response_complete
        if not waits or cycle.scope["http_version"] == "1.0":  # HTTP/1.0 has no interim responses
            return False
        if not self._half_closed.is_set():
            self._half_closed.set()
            self._poll()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed.is_set():
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()  # the rest of a body that was refused did not arrive in time

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.abort()  # a request that has not fully arrived is not waited for
        else:
            super().shutdown()

    def _time_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(self._limits.head_s, self._too_slow)

    def _too_slow(self) -> None:
        if self.conn.trailing_data[0]:
            text = f"The headers did not arrive within {self._limits.head_s:g} seconds."
            self._refuse(Refusal(408, text, "request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a connection that has not sent a whole request, and close it."""
        self._write(refusal)
        self.transport.close()

    def _write(self, refusal: Refusal) -> None:
        """Write a refusal, as the last that is written."""
        body = json.dumps(refusal.body).encode()
        reason = HTTPStatus(refusal.status).phrase
        head = [
            f"HTTP/1.1 {refusal.status} {reason}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([f"Retry-After: {RETRY_S}"] if refusal.retry else []),
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)

    def _poll(self) -> None:
        """Check whether the client is still connected, and provoke a reset if it is not."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not cycle.response_started and self._polls % _POLLS_PER_PROBE == 0:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self._polls += 1
        self.loop.call_later(_POLL_S, self._poll)


class _StrictHTTP(h11.Connection):
    """Refuses requests that others may read differently.

    Attributes:
        fault: what is wrong with the latest request, in words; empty if nothing is.
    """

    fault = ""

    def next_event(self) -> Any:
        """The next event, as h11 has it.

        Raises:
            h11.RemoteProtocolError: the request is not valid HTTP/1.1.
        """
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.fault = str(error).partition(": bytearray(")[0]  # of Python, with bytes of the client
            raise
        if isinstance(event, h11.Request):
            head = before[: len(before) - len(self.trailing_data[0])]
            self.fault = _ambiguity(event, _STATED_LENGTH.findall(head))
            if self.fault:
                raise h11.RemoteProtocolError(self.fault)
        return event


def _ambiguity(request: h11.Request, lengths: list[bytes]) -> str:
    """The reason why the end of a request could be read in two ways; empty if it cannot.

    Args:
        lengths: the values of its Content-Length headers, which h11 merges.
    """
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        return "it has several Content-Length headers"
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        if lengths:
            return "it has both Content-Length and Transfer-Encoding"
        if request.http_version != b"1.1":
            return "it has a Transfer-Encoding, but is not HTTP/1.1"
    return ""
