"""The HTTP server: uvicorn around the application, and how it shuts down."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn

from edgespec.api.limits import Limits
from edgespec.serving.app import Application
from edgespec.serving.connection import connection_type
from edgespec.serving.request_bodies import RestOfBody

_GRACE_S = 3


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM; then answers in progress are ended.

    Attributes:
        ended_by: the signal that ended it; 0 if there was none yet.
    """

    def __init__(self, app: Application, limits: Limits, *, verbose: bool = False) -> None:
        self.ended_by = 0
        self._application = app
        super().__init__(
            uvicorn.Config(
                RestOfBody(app, limits),
                loop="asyncio",
                http=connection_type(limits),
                ws="none",
                lifespan="off",
                log_level="info" if verbose else "error",
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; a second SIGINT does not wait for clients."""
        # Unlike in uvicorn, signals are not raised again afterwards: the model has to be closed first.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.ended_by = self.ended_by or sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End answers first; waiting for them could take forever."""
        self._application.stop()
        await super().shutdown(sockets)
