"""Sends the answer to one request: whole, or event by event with signs of life in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from edgespec.api.endpoint import Event, PromptEndpoint, ResponseBuilder
from edgespec.api.refusals import Refusal
from edgespec.serving.engine_worker import PrefillProgress

WARNINGS = "x-edgespec-warnings"
"""The header of responses that has the warnings."""

_KEEP_ALIVE_S = 15.0
_NO_BUFFERING = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ResponseSender:
    """Sends the answer to one request.

    Attributes:
        failure: gives the body of an error.
        refusal: why there is no answer, or why it is not complete; None if nothing is wrong.
        status: the HTTP status that was sent; 0 before that.
        streamed: whether the answer is sent event by event.
        warnings: what of the request has no effect; sent as a header.
    """

    def __init__(
        self, failure: Callable[[Refusal], Event], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.failure = failure
        self.http = HTTPRequest(scope, receive)
        self.status = 0
        self.streamed = False
        self._scope = scope
        self._receive = receive
        self._to_client = send
        self.refusal: Refusal | None = None
        self.warnings: Sequence[str] = ()
        self._started = self._complete = False

    @property
    def outcome(self) -> str:
        """The outcome of the request, as `Metrics` names it."""
        if self.refusal is not None:
            status = self.refusal.status
            return "turned_away" if status == 429 else "failed" if status >= 500 else "refused"
        return "answered" if self._complete else "abandoned"

    async def whole(self, body: Mapping[str, object] | bytes) -> None:
        """Send a whole answer, which may be JSON already."""
        if isinstance(body, bytes):
            response = Response(body, headers=self._noted, media_type="application/json")
        else:
            response = JSONResponse(body, headers=self._noted)
        await response(self._scope, self._receive, self._send)
        self._complete = True

    async def refuse(self, refusal: Refusal) -> None:
        """Send an error, unless an answer has begun."""
        self.refusal = refusal
        if not self._started:
            await refusal.response(self.failure(refusal))(self._scope, self._receive, self._send)

    async def stream(
        self,
        endpoint: PromptEndpoint,
        events: AsyncGenerator[Event | PrefillProgress, None],
        builder: ResponseBuilder,
    ) -> None:
        """Send an answer event by event, with a sign of life now and then while there is none.

        Args:
            endpoint: decides the form of the stream.
        """
        self.streamed = True
        named = {"content-type": endpoint.media_type, **_NO_BUFFERING, **self._noted}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(_framed(events, endpoint, builder)) as pieces:
            async for piece in pieces:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": endpoint.last, "more_body": False})
        self._complete = True

    @property
    def _noted(self) -> dict[str, str]:
        """The header with the warnings: a JSON list in ASCII."""
        return {WARNINGS: json.dumps(list(self.warnings))} if self.warnings else {}

    async def _send(self, message: Message) -> None:
        self._started = True
        self.status = message.get("status", self.status)
        await self._to_client(message)


async def _framed(
    events: AsyncGenerator[Event | PrefillProgress, None],
    endpoint: PromptEndpoint,
    builder: ResponseBuilder,
) -> AsyncGenerator[bytes, None]:
    """The events as they are sent, with signs of life in between, so that proxies do not give up."""

    async def following() -> Event | PrefillProgress | None:
        return await anext(events, None)

    coming = asyncio.create_task(following())
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=_KEEP_ALIVE_S)
            if not done:
                yield endpoint.waiting(builder)
                continue
            event = coming.result()
            if event is None:
                return
            yield (
                endpoint.prefill_progress(builder, event)
                if isinstance(event, PrefillProgress)
                else endpoint.frame(event)
            )
            coming = asyncio.create_task(following())
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()
