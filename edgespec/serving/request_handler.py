"""Handling requests of any kind: their bodies, clients that leave, shutting down, and the log."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive

from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal, ShuttingDown, forget_frames, logged_refusal
from edgespec.generation.result import Generation
from edgespec.serving.anthropic.endpoints import MessagesEndpoint
from edgespec.serving.model_worker import ModelWorker
from edgespec.serving.ollama.endpoints import failure
from edgespec.serving.request_bodies import BodyReceiver, RequestBody
from edgespec.serving.request_log import GONE, RequestLogEntry
from edgespec.serving.response_sender import ResponseSender

_THREADS = 2
_SHUTDOWN_REPLY_S = 1.0
OLLAMA = "/api/"
Reply = Callable[[HTTPRequest], Awaitable[Response]]


class Failing(Protocol):
    """An endpoint, with the form of its errors."""

    def failure(self, refusal: Refusal) -> dict[str, Any]: ...


Worker = TypeVar("Worker", bound=ModelWorker[Any, Any])
EndpointT = TypeVar("EndpointT", bound=Failing)


class RequestHandler(ABC, Generic[Worker, EndpointT]):
    """Answers requests; each is abandoned as soon as its client disconnects or the server shuts down.

    Args:
        model: the name it answers to.
        aliases: other names that it answers to; they may be patterns such as "claude-*".
        limits: bounds on requests.
        on_request: called with an entry for the log when a request is done.

    Attributes:
        names: the model's, and its aliases; there may be more later.
        limits: the same.
        bodies: receives those of requests.
    """

    def __init__(
        self,
        worker: Worker,
        model: str,
        limits: Limits,
        *,
        aliases: Sequence[str] = (),
        on_request: Callable[[RequestLogEntry], None] | None = None,
    ) -> None:
        self.worker = worker
        self.names = (model, *aliases)
        self._model = model
        self._on_request = on_request
        self.limits = limits
        self.bodies = BodyReceiver(limits)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._stopping = asyncio.Event()

    def drain(self) -> None:
        """Refuse requests that arrive from now on; called on the event loop, as is `stop`."""
        self.bodies.close()

    def stop(self) -> None:
        """Refuse new requests, and end the others."""
        self._stopping.set()
        self.worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def answer(self, sender: ResponseSender, endpoint: EndpointT) -> None:
        """Answer one request; returns when it is answered, refused or abandoned."""
        start = time.perf_counter()
        answers: list[Generation] = []
        try:
            async with self.bodies.received(sender.http) as body:
                await self._until_abandoned(sender, self._respond(sender, endpoint, body, answers))
        except ClientDisconnect:
            pass
        except Exception as error:
            refusal = logged_refusal(error)
            forget_frames(error)
            await sender.refuse(refusal)
        finally:
            self.worker.metrics.request_ended(sender.outcome)
            if self._on_request is not None:
                seconds = time.perf_counter() - start
                asked, status = sender.http.scope["path"], sender.status or GONE
                self._on_request(
                    RequestLogEntry.of(
                        asked, status, seconds, answers, streamed=sender.streamed, warnings=sender.warnings
                    )
                )

    async def _until_abandoned(self, sender: ResponseSender, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, unless the client disconnects or the server shuts down first."""
        working = asyncio.create_task(work)
        gone = asyncio.create_task(until_disconnected(sender.http.receive))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({working, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not gone.done():  # the worker still sends its error
                await asyncio.wait({working}, timeout=_SHUTDOWN_REPLY_S)
        finally:
            for task in (working, gone, stopping):
                task.cancel()
            await asyncio.gather(working, gone, stopping, return_exceptions=True)
        if not working.cancelled():
            working.result()
        elif self._stopping.is_set():
            raise ShuttingDown

    @abstractmethod
    async def _respond(
        self, sender: ResponseSender, endpoint: EndpointT, body: RequestBody, answers: list[Generation]
    ) -> None:
        """Answer a request that has arrived.

        Args:
            endpoint: what decides the forms of requests and answers.
            answers: gets what is generated, for the log.
        """


def failure_at(path: str, refusal: Refusal) -> dict[str, Any]:
    """The body of an error, in the form of the API that a path belongs to."""
    if path.startswith("/v1/messages"):
        return MessagesEndpoint().failure(refusal)
    return failure(refusal) if path.startswith(OLLAMA) else refusal.body


def refusing(reply: Reply) -> Reply:
    """A handler that answers with its errors, too."""

    async def handler(http: HTTPRequest) -> Response:
        try:
            return await reply(http)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Exception as error:
            refusal = logged_refusal(error)
            return refusal.response(failure_at(http.url.path, refusal))

    return handler


async def until_disconnected(receive: Receive) -> None:
    """Return when the client of a request that was received has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
