"""`/api/pull`: clients ask for a model before they use it, and may download it if the server allows that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgespec.api.endpoint import json_line
from edgespec.api.refusals import logged_refusal
from edgespec.base.progress import Progress

LINES = "application/x-ndjson"
_SUCCESS = {"status": "success"}


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


def asked_model(content: bytes | bytearray) -> AskedModel:
    """Read a body as far as it says where a request goes; what is wrong with the rest is said there."""
    try:
        return msgspec.json.decode(content, type=AskedModel) if content else AskedModel()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return AskedModel()


class _Gone(Exception):
    """The client did not wait for the download; what has arrived is kept."""


class Puller:
    """Downloads models.

    Args:
        pull: downloads the model of a name and offers it to clients.
    """

    def __init__(self, pull: Callable[[str, Progress], None]) -> None:
        self._pull = pull
        self._one = asyncio.Lock()

    async def lines(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """The progress of a download, as Ollama's clients read it; an error is the last line."""
        loop, steps = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()
        gone = threading.Event()

        def report(what: str, done: float) -> None:
            if gone.is_set():
                raise _Gone
            step = {"status": what, "completed": round(100 * done), "total": 100}  # in per cent
            loop.call_soon_threadsafe(steps.put_nowait, step)

        async def download() -> dict[str, Any]:
            try:
                await asyncio.to_thread(partial(self._pull, name, report))
            except _Gone:
                return {"error": "The client disconnected."}
            except Exception as error:
                return {"error": logged_refusal(error).message}
            finally:
                steps.put_nowait(None)
            return _SUCCESS

        yield {"status": "pulling manifest"}
        async with self._one:
            downloading = asyncio.create_task(download())
            try:
                while (step := await steps.get()) is not None:
                    yield step
                yield await downloading
            finally:
                gone.set()
                await asyncio.gather(downloading, return_exceptions=True)


def as_line(step: dict[str, Any]) -> bytes:
    """A step as a line of a stream."""
    return f"{json_line(step)}\n".encode()


async def present() -> AsyncIterator[dict[str, Any]]:
    """The progress of a download of what is there."""
    yield _SUCCESS


async def pull_response(steps: AsyncIterator[dict[str, Any]], asked: AskedModel) -> Response:
    """The response to a request for a model: all steps of a download, or the last one."""
    if asked.stream is not False:
        return StreamingResponse((as_line(step) async for step in steps), media_type=LINES)
    last = [step async for step in steps][-1]
    return JSONResponse(last, 500 if "error" in last else 200)
