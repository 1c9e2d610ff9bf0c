"""`/api/pull`: clients ask for a model before they use it, and may download it if the server allows that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgespec.api.endpoint import json_line
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal, ShuttingDown, logged_refusal
from edgespec.base.progress import Progress
from edgespec.serving.ollama.endpoints import failure
from edgespec.serving.request_bodies import parse

LINES = "application/x-ndjson"
_AT_ONCE = 4  # downloads; a host that does not answer delays no other one
_SUCCESS = {"status": "success"}
Step = dict[str, Any] | Refusal
"""A step of a download as Ollama's clients read it, or why there is no further one."""


class AskedModel(msgspec.Struct):
    """The fields that decide where a request goes."""

    model: Any = None
    name: Any = None  # the model, in older clients of Ollama
    stream: Any = None

    @property
    def name_of_model(self) -> str:
        """The name of the model; empty if it has none."""
        given = self.model or self.name
        return given if isinstance(given, str) else ""


_AS_ASKED = msgspec.json.Decoder(AskedModel)  # made here, as the first use of a type is not safe in threads


def asked_model(content: bytes | bytearray, limits: Limits) -> AskedModel:
    """Read a body as far as it says where a request goes; called in a thread.

    Raises:
        Refusal: it is not JSON, or exceeds a limit.
    """
    try:
        return _AS_ASKED.decode(content) if content else AskedModel()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Applications take more than this reader does, such as halves of characters.
        body = parse(content, values=2 * limits.values, depth=limits.depth)
        found = body if isinstance(body, dict) else {}
        return AskedModel(found.get("model"), found.get("name"), found.get("stream"))


class _Gone(Exception):
    """The client did not wait for the download; what has arrived is kept."""


class Puller:
    """Downloads models: several at once, but each only once.

    Args:
        pull: downloads the model of a name and offers it to clients.
    """

    def __init__(self, pull: Callable[[str, Progress], None]) -> None:
        self._pull = pull
        self._running: dict[str, asyncio.Queue[Step]] = {}  # the steps of downloads, by names of models
        self._changed = asyncio.Event()  # another one may run, or none may any more
        self._stopping = False

    def stop(self) -> None:
        """End the downloads that are running and those that wait; called on the event loop.

        What has arrived is kept.
        """
        self._stopping = True
        self._changed.set()
        for steps in self._running.values():
            steps.put_nowait(ShuttingDown())

    async def steps(self, name: str) -> AsyncIterator[Step]:
        """The progress of a download; a failure is the last step."""
        loop, steps = asyncio.get_running_loop(), asyncio.Queue[Step]()
        gone = threading.Event()

        def tell(step: Step) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(steps.put_nowait, step)

        def report(what: str, done: float) -> None:
            if gone.is_set():
                raise _Gone
            tell({"status": what, "completed": round(100 * done), "total": 100})  # in per cent

        def download() -> None:
            try:
                self._pull(name, report)
            except _Gone:
                return
            except Exception as error:
                tell(logged_refusal(error))
            else:
                tell(_SUCCESS)

        yield {"status": "pulling manifest"}
        while not self._stopping and (name in self._running or len(self._running) == _AT_ONCE):
            self._changed.clear()
            await self._changed.wait()
        if self._stopping:
            yield ShuttingDown()
            return
        self._running[name] = steps
        # Nobody waits for this thread: a host that does not answer would keep the server from ending.
        threading.Thread(target=download, daemon=True).start()
        try:
            while True:
                step = await steps.get()
                yield step
                if step is _SUCCESS or isinstance(step, Refusal):
                    return
        finally:
            del self._running[name]
            self._changed.set()
            gone.set()


def as_line(step: Step) -> bytes:
    """A step as a line of a stream."""
    return f"{json_line(failure(step) if isinstance(step, Refusal) else step)}\n".encode()


async def present() -> AsyncIterator[Step]:
    """The progress of a download of what is there."""
    yield _SUCCESS


async def pull_response(steps: AsyncIterator[Step], asked: AskedModel) -> Response:
    """The response to a request for a model: all steps of a download, or the last one.

    Raises:
        Refusal: that is a failure.
    """
    if asked.stream is not False:
        return StreamingResponse((as_line(step) async for step in steps), media_type=LINES)
    last = [step async for step in steps][-1]
    if isinstance(last, Refusal):
        raise last
    return JSONResponse(last)
