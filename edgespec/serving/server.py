"""The HTTP server: uvicorn around the application, and how it ends."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn

from edgespec.serving.app import Application
from edgespec.serving.connection import connection_type
from edgespec.serving.limits import Limits

_GRACE_S = 3


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM comes; then answers in progress are ended.

    Attributes:
        ended_by: the signal; 0 while none came.
    """

    def __init__(self, app: Application, limits: Limits, *, verbose: bool = False) -> None:
        self.ended_by = 0
        self._application = app
        super().__init__(
            uvicorn.Config(
                app,
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
        """Begin to end; a second SIGINT does not wait for clients."""
        # Signals are not raised again afterwards, as uvicorn would: the model has to be closed first.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.ended_by = self.ended_by or sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End answers first, as there would be no end to waiting for them."""
        self._application.stop()
        await super().shutdown(sockets)
