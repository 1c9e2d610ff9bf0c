"""The HTTP server: uvicorn around the application, and how it shuts down."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.api.limits import Limits
from edgespec.api.refusals import RETRY_S, Refusal
from edgespec.serving.app import Application
from edgespec.serving.model_router import ModelRouter
from edgespec.serving.request_handler import failure_at

_GRACE_S = 3
_POLL_S = 0.1


class _Connection(H11Protocol):
    """A connection of uvicorn's that may not stay silent, and logs no traceback for a malformed request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Allow the first request as much time as uvicorn allows each further one."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def send_400_response(self, msg: str) -> None:
        """Answer, unless the request has an answer already; the application can send no other one."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


@contextmanager
def told_to_wait(sockets: Sequence[socket.socket]) -> Iterator[None]:
    """A block during which requests are told that the model is being loaded."""
    config = uvicorn.Config(
        _say_that_it_loads,
        # Windows' usual loop would keep the sockets, and the next server could not accept.
        loop="asyncio:SelectorEventLoop",
        ws="none",
        lifespan="off",
        log_level="error",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    server = uvicorn.Server(config)
    # The server closes its sockets when it ends; connections to the others wait for the next server.
    copies = [listener.dup() for listener in sockets]
    answering = threading.Thread(target=server.run, kwargs={"sockets": copies}, name="meanwhile", daemon=True)
    answering.start()
    try:
        yield
    finally:
        server.should_exit = True
        answering.join()


async def _say_that_it_loads(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer any request while the model is being loaded."""
    text = "The model is being loaded."
    refusal = Refusal(503, f"{text} Try again in {RETRY_S} seconds.", "model_loading", retry=True)
    body = {"status": "loading", "reason": text} if scope["path"] == "/health" else None
    await refusal.response(body or failure_at(scope["path"], refusal))(scope, receive, send)


class Server(uvicorn.Server):
    """Serves until SIGTERM, then completes the answers in progress; other signals, or a second one, end them.

    Attributes:
        interrupted: whether a signal other than SIGTERM came.
    """

    def __init__(self, app: Application | ModelRouter, limits: Limits, *, verbose: bool = False) -> None:
        self.interrupted = False
        self._is_draining = False
        self._app = app
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_Connection,
                limit_concurrency=limits.connections,
                ws="none",
                lifespan="off",
                log_level="info" if verbose else "error",
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
                # Only X-Forwarded-Proto matters, and it admits no page: see OriginCheck. Clients at a Unix
                # socket or in another container are trusted as those on this machine are.
                forwarded_allow_ips="*",
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down, or hurry up; a second Ctrl-C does not wait for clients."""
        # Unlike in uvicorn, signals are not raised again afterwards: the model has to be closed first.
        self.force_exit = self.interrupted
        self.interrupted |= sig != signal.SIGTERM
        self._is_draining = not self.should_exit and not self.interrupted
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, complete the others if that is wanted, and end what is left."""
        for server in self.servers:
            server.close()  # the next server may have the address
        self._app.drain()
        while self._is_draining and self._app.is_busy:
            await asyncio.sleep(_POLL_S)
        self._app.stop()
        await super().shutdown(sockets)
