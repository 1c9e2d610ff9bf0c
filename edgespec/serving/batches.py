"""Batches of the OpenAI and Anthropic APIs: requests that are answered a few at a time, and fetched later.

Each goes through the application like one of a client that waits: to the same paths and models, within the
same limits. Files and results are kept in memory until the server ends. A client finds those that were made
with its own key.
"""

from __future__ import annotations

import asyncio
import email
import email.policy
import json
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from edgespec.api.fields import converted
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal, ShuttingDown
from edgespec.base.latest import LatestValues
from edgespec.serving.kept import listed
from edgespec.serving.keys import owner_of
from edgespec.serving.request_bodies import BodyReceiver, parse
from edgespec.serving.request_handler import Reply, failure_at, refusing

_AT_ONCE = 4  # requests of all batches, so that others find places in the passes
_AGAIN_S = 0.5  # until a request that found no place in the queue is sent again
_MAX_REQUESTS = 100_000
_MAX_VALUES = 10 * _MAX_REQUESTS  # in the JSON of a body with all requests; one of a single message has nine
_MAX_BATCHES = 1024
_MAX_FILE_BYTES = 256 << 20  # of all files together
_MAX_BATCH_BYTES = 256 << 20  # of the requests and answers of all batches together
_MAX_PARTS = 64  # of a form
_MAX_FILES = 1024
_MAX_NAME = 512  # characters of a custom_id, a purpose, or what a client notes
_MAX_NOTES = 16
_LINE_BYTES = 350  # that a request takes beside its body
_MAX_HEAD = 4096  # bytes of the headers of a part
_DAY_S = 24 * 60 * 60
_FILES, _BATCHES, _MESSAGES = "/v1/files", "/v1/batches", "/v1/messages/batches"
_OWN_HEADERS = (b"content-length", b"content-type", b"content-encoding", b"transfer-encoding")


@dataclass(slots=True)
class _Line:
    """A request of a batch, and its answer."""

    identifier: str
    path: str
    body: bytes  # empty once it was answered
    status: int = 0  # 0 until it was answered
    answer: bytes = b""


@dataclass(eq=False)
class _Batch:
    id: str
    lines: Sequence[_Line]
    asked: dict[str, Any] = field(default_factory=dict)  # fields of its request, which clients are shown
    owner: bytes = b""  # see `owner_of`
    made_at: float = field(default_factory=time.time)
    cancelled_at: float | None = None
    ended_at: float | None = None
    files: dict[str, str] = field(default_factory=dict)  # those of its results
    task: asyncio.Task[None] | None = None
    n_bytes: int = 0  # of its requests and answers
    answered: int = 0  # requests
    failed: int = 0

    def __post_init__(self) -> None:
        self.n_bytes = sum(_LINE_BYTES + len(line.body) for line in self.lines)

    def answer(self, line: _Line, status: int, content: bytes) -> None:
        """Keep the answer to a request, or the error instead, and the request no longer."""
        self.n_bytes += len(content) - len(line.body)
        line.status, line.answer, line.body = status, content, b""
        if status < 400:
            self.answered += 1
        else:
            self.failed += 1


_File = tuple[dict[str, Any], bytes, bytes]  # its description, its content, and whose it is
_Name = Annotated[str, Meta(max_length=_MAX_NAME)]
_NOTES = f"an object of at most {_MAX_NOTES} texts of {_MAX_NAME} characters"


class _BatchOfFile(Struct):
    """The body of a request that begins a batch of the lines of a file."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[_Name, _Name], Meta(max_length=_MAX_NOTES, description=_NOTES)] | None = None


class _BatchOfMessages(Struct):
    """The body of a request that begins a batch of Anthropic's API."""

    requests: list[dict[str, Any]]


class Batches:
    """The batches of a server, and the files that they are made of.

    Args:
        app: answers each request.
        paths: those that requests may be for.
        bodies: receives those of requests.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str], limits: Limits, bodies: BodyReceiver) -> None:
        self._app = app
        self._paths = [path for path in paths if path.startswith("/v1/")]
        self._limits = limits
        self._bodies = bodies
        self._files: LatestValues[_File] = LatestValues(_MAX_FILE_BYTES, _MAX_FILES)
        self._batches: dict[str, _Batch] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._stopped = False

    def routes(self) -> list[Route]:
        """The routes of both APIs."""
        by_path: dict[str, dict[str, Reply]] = {
            _FILES: {"POST": self._upload, "GET": self._list_files},
            f"{_FILES}/{{id}}": {"GET": self._show_file, "DELETE": self._delete_file},
            f"{_FILES}/{{id}}/content": {"GET": self._content},
            _BATCHES: {"POST": self._begin_file, "GET": self._list},
            f"{_BATCHES}/{{id}}": {"GET": self._show},
            f"{_BATCHES}/{{id}}/cancel": {"POST": self._cancel},
            _MESSAGES: {"POST": self._begin_messages, "GET": self._list},
            f"{_MESSAGES}/{{id}}": {"GET": self._show, "DELETE": self._delete},
            f"{_MESSAGES}/{{id}}/cancel": {"POST": self._cancel},
            f"{_MESSAGES}/{{id}}/results": {"GET": self._results},
        }
        return [
            Route(path, refusing(reply), methods=[method])
            for path, replies in by_path.items()
            for method, reply in replies.items()
        ]

    def stop(self) -> None:
        """Answer no further requests: the server ends, and nobody could fetch their answers."""
        self._stopped = True
        for batch in self._batches.values():
            if batch.task is not None:
                batch.task.cancel()

    # Files

    async def _upload(self, http: Request) -> Response:
        content = await self._received(http)
        kind = http.headers.get("content-type", "")
        name, purpose, data = await asyncio.to_thread(_uploaded, content, kind)
        return JSONResponse(self._keep_file(name, purpose, data, owner_of(http.scope)))

    def _keep_file(self, name: str, purpose: str, data: bytes, owner: bytes) -> dict[str, Any]:
        about = {
            "id": f"file-{uuid.uuid4().hex}",
            "object": "file",
            "bytes": len(data),
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        self._files.put(about["id"], (about, data, owner), len(data))
        return about

    async def _list_files(self, http: Request) -> Response:
        asking = owner_of(http.scope)
        own = [about for about, _, owner in self._files.values() if owner == asking]
        return JSONResponse(listed(own))

    async def _show_file(self, http: Request) -> Response:
        return JSONResponse(self._file(http, http.path_params["id"])[0])

    async def _delete_file(self, http: Request) -> Response:
        about, _ = self._file(http, http.path_params["id"])
        self._files.remove(about["id"])
        return JSONResponse({"id": about["id"], "object": "file", "deleted": True})

    async def _content(self, http: Request) -> Response:
        _, data = self._file(http, http.path_params["id"])
        return Response(data, media_type="application/octet-stream")

    def _file(self, http: Request, identifier: str) -> tuple[dict[str, Any], bytes]:
        found = self._files.get(identifier)
        if found is None or found[2] != owner_of(http.scope):
            raise Refusal(404, f"There is no file {identifier[:80]!r}.", "file_not_found")
        return found[:2]

    # Batches

    async def _begin_file(self, http: Request) -> Response:
        asked = converted(await self._json(http), _BatchOfFile)
        if asked.endpoint not in self._paths:
            raise Refusal(400, f"endpoint must be one of {', '.join(self._paths)}.")
        _, data = self._file(http, asked.input_file_id)
        lines = await asyncio.to_thread(lambda: list(self._lines(data, asked.endpoint)))
        return self._begin(http, _Batch(f"batch_{uuid.uuid4().hex}", lines, to_builtins(asked)))

    async def _begin_messages(self, http: Request) -> Response:
        requests = converted(await self._json(http, _MAX_VALUES), _BatchOfMessages).requests

        def read() -> list[_Line]:
            return [
                _line(one.get("custom_id"), "/v1/messages", one.get("params"), f"requests[{place}]")
                for place, one in enumerate(requests)
            ]

        return self._begin(http, _Batch(f"msgbatch_{uuid.uuid4().hex}", await asyncio.to_thread(read)))

    def _begin(self, http: Request, batch: _Batch) -> Response:
        if self._stopped:
            raise ShuttingDown
        if not 1 <= len(batch.lines) <= _MAX_REQUESTS:
            text = f"The batch has {len(batch.lines):,} requests. It must have 1 to {_MAX_REQUESTS:,}."
            raise Refusal(400, text)
        if len({line.identifier for line in batch.lines}) < len(batch.lines):
            raise Refusal(400, "Several requests of the batch have the same custom_id.")
        if not self._has_room(batch.n_bytes, batches=1):
            raise Refusal(429, "The batches that are being answered are too large. Cancel one, or wait.")
        batch.owner = owner_of(http.scope)
        self._batches[batch.id] = batch
        batch.task = asyncio.create_task(self._answer_all(batch, http.scope))
        return self._told(batch, http)

    def _has_room(self, n_bytes: int, batches: int = 0) -> bool:
        """Forget the oldest batches that are done until there is room for so many bytes and batches more."""
        sizes = {one.id: one.n_bytes for one in self._batches.values()}
        done = [one.id for one in self._batches.values() if one.ended_at is not None]

        def is_full() -> bool:
            too_large = sum(sizes.values()) + n_bytes > _MAX_BATCH_BYTES
            return too_large or len(sizes) + batches > _MAX_BATCHES

        while done and is_full():
            del sizes[done.pop(0)]
        if is_full():
            return False
        self._batches = {identifier: self._batches[identifier] for identifier in sizes}
        return True

    async def _answer_all(self, batch: _Batch, scope: Scope) -> None:
        left = iter(batch.lines)

        async def answer_some() -> None:
            for line in left:
                while batch.cancelled_at is None and not line.status:
                    async with self._places:
                        await asyncio.sleep(0)  # a refusal takes no time, and others wait
                        status, answer, again = await _asked(self._app, scope, line)
                    if again:
                        await asyncio.sleep(_AGAIN_S)
                    else:
                        if not self._has_room(len(answer) - len(line.body)):
                            full = Refusal(507, "The answers of all batches take too much memory.")
                            status, answer = 507, json.dumps(failure_at(line.path, full)).encode()
                        batch.answer(line, status, answer)

        await asyncio.gather(*(answer_some() for _ in range(_AT_ONCE)))
        if batch.id.startswith("batch_"):
            for name, n, answered in (
                ("output_file_id", batch.answered, True),
                ("error_file_id", batch.failed, False),
            ):
                if n:
                    content = await asyncio.to_thread(_results_of, batch, answered=answered)
                    about = self._keep_file(f"{batch.id}.jsonl", "batch_output", content, batch.owner)
                    batch.files[name] = about["id"]
        batch.ended_at = time.time()

    async def _list(self, http: Request) -> Response:
        of_messages, asking = http.url.path.startswith(_MESSAGES), owner_of(http.scope)
        own = [one for one in self._batches.values() if one.owner == asking]
        batches = [one for one in own if one.id.startswith("msg") == of_messages]
        return JSONResponse(listed([_about(one, http) for one in reversed(batches)]))

    async def _show(self, http: Request) -> Response:
        return self._told(self._batch(http), http)

    async def _cancel(self, http: Request) -> Response:
        batch = self._batch(http)
        if batch.ended_at is None and batch.cancelled_at is None:
            batch.cancelled_at = time.time()
        return self._told(batch, http)

    async def _delete(self, http: Request) -> Response:
        batch = self._batch(http)
        if batch.ended_at is None:
            raise Refusal(400, "The batch is being answered. Cancel it first.")
        del self._batches[batch.id]
        return JSONResponse({"id": batch.id, "type": "message_batch_deleted"})

    async def _results(self, http: Request) -> Response:
        batch = self._batch(http)
        if batch.ended_at is None:
            raise Refusal(404, "The batch has no results yet: it is being answered.")
        content = await asyncio.to_thread(_message_results, batch)
        return Response(content, media_type="application/x-jsonl")

    def _batch(self, http: Request) -> _Batch:
        identifier = http.path_params["id"]
        batch = self._batches.get(identifier)
        if batch is None or batch.owner != owner_of(http.scope):
            raise Refusal(404, f"There is no batch {identifier[:80]!r}.", "batch_not_found")
        return batch

    def _told(self, batch: _Batch, http: Request) -> Response:
        return JSONResponse(_about(batch, http))

    # Requests

    async def _received(self, http: Request) -> bytes:
        async with self._bodies.received(http) as body:
            return bytes(await asyncio.to_thread(body.decoded, self._limits.body))

    async def _json(self, http: Request, values: int = 0) -> dict[str, Any]:
        return await asyncio.to_thread(self._parsed, await self._received(http), values=values)

    def _parsed(self, content: bytes, where: str = "The body", values: int = 0) -> dict[str, Any]:
        value = parse(content, values=max(values, self._limits.values), depth=self._limits.depth)
        if not isinstance(value, dict):
            raise Refusal(400, f"{where} is not a JSON object.")
        return value

    def _lines(self, data: bytes, endpoint: str) -> Iterator[_Line]:
        """The requests in a file, all for one endpoint."""
        for number, content in enumerate(data.splitlines(), start=1):
            if not content.strip():
                continue
            if number > 2 * _MAX_REQUESTS:
                raise Refusal(400, f"The file has more than {2 * _MAX_REQUESTS:,} lines.")
            where = f"Line {number}"
            try:
                one = self._parsed(content, where)
            except Refusal as refusal:
                raise Refusal(400, refusal.message.replace("The body", where)) from None
            for name, wanted in (("url", endpoint), ("method", "POST")):
                if one.get(name) != wanted:
                    raise Refusal(400, f"{where}: {name} must be {wanted}.")
            yield _line(one.get("custom_id"), endpoint, one.get("body"), where)


def _line(identifier: object, path: str, body: object, where: str) -> _Line:
    if not isinstance(identifier, str) or not 1 <= len(identifier) <= _MAX_NAME:
        text = f"{where}: custom_id must be a non-empty string of at most {_MAX_NAME} characters."
        raise Refusal(400, text)
    if not isinstance(body, dict):
        raise Refusal(400, f"{where}: the request of {identifier[:80]!r} is not an object.")
    return _Line(identifier, path, json.dumps({**body, "stream": False}).encode())


async def _asked(app: ASGIApp, scope: Scope, line: _Line) -> tuple[int, bytes, bool]:
    """The status and the body of the answer to a request, and whether to ask again later.

    Args:
        scope: of the client's request, whose key and host count.
    """
    content, status, retries, answer = [line.body], 0, False, bytearray()

    async def receive() -> Message:
        if not content:
            await asyncio.Future()  # this client does not disconnect
        return {"type": "http.request", "body": content.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, retries
        if message["type"] == "http.response.start":
            status = message["status"]
            retries = any(name.lower() == b"retry-after" for name, _ in message["headers"])
        answer.extend(message.get("body", b""))

    headers = [(name, value) for name, value in scope["headers"] if name not in _OWN_HEADERS]
    asked = {"method": "POST", "path": line.path, "raw_path": line.path.encode(), "query_string": b""}
    with suppress(Exception):  # of a bug, which the application has logged, and answered with a 500
        await app({**scope, **asked, "headers": headers}, receive, send)
    if not status:
        status, answer = 500, bytearray(b'{"error": {"message": "The request ended without an answer."}}')
    return status, bytes(answer), retries


def _uploaded(content: bytes, content_type: str) -> tuple[str, str, bytes]:
    """The name, purpose and content of a file that was sent as a form."""
    try:
        return _read_form(content, content_type)
    except (LookupError, ValueError, RecursionError) as error:  # of Python's parser of headers
        raise Refusal(400, "A header of the form is invalid.") from error


def _read_form(content: bytes, content_type: str) -> tuple[str, str, bytes]:
    form = _headers(f"Content-Type: {content_type}".encode("latin-1", "replace"))
    boundary = form.get_boundary()
    parts: dict[Any, tuple[EmailMessage, bytes]] = {}
    if form.get_content_type() == "multipart/form-data" and boundary:
        line = b"\r\n--" + boundary.encode("latin-1", "replace")
        if line + b"--" not in content:
            raise Refusal(400, "The form has no closing boundary, so its end may be missing.")
        for part in (b"\r\n" + content).split(line, _MAX_PARTS)[1:]:
            head, _, data = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
            about = _headers(head)
            parts[about.get_param("name", header="content-disposition")] = about, data
    if "file" not in parts:
        raise Refusal(400, "Send the file as multipart/form-data, in the fields 'file' and 'purpose'.")
    about, data = parts["file"]
    purpose = parts["purpose"][1] if "purpose" in parts else b"batch"
    return about.get_filename("file"), purpose[:_MAX_NAME].decode("utf-8", "replace"), data


def _headers(lines: bytes) -> EmailMessage:
    message = email.message_from_bytes(lines[:_MAX_HEAD] + b"\r\n\r\n", policy=email.policy.HTTP)
    assert isinstance(message, EmailMessage)
    return message


def _results_of(batch: _Batch, *, answered: bool) -> bytes:
    """The content of the file with the answers of a batch, or with its errors."""
    lines = []
    for line in batch.lines:
        if line.status and (line.status < 400) == answered:
            body = json.loads(line.answer)
            response = {"status_code": line.status, "request_id": line.identifier, "body": body}
            identifier = f"batch_req_{uuid.uuid4().hex}"
            lines.append(
                {"id": identifier, "custom_id": line.identifier, "response": response, "error": None}
            )
    return _json_lines(lines)


def _message_results(batch: _Batch) -> bytes:
    """The results of a batch of Anthropic's API."""
    return _json_lines(_message_result(line) for line in batch.lines)


def _json_lines(values: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _message_result(line: _Line) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "canceled"}
    if line.status:
        failed, answer = line.status >= 400, json.loads(line.answer)
        result = {"type": "errored", "error": answer} if failed else {"type": "succeeded", "message": answer}
    return {"custom_id": line.identifier, "result": result}


def _about(batch: _Batch, http: Request) -> dict[str, Any]:
    """A batch in the form of its API."""
    done, failed = batch.answered, batch.failed
    if batch.id.startswith("msg"):
        rest = len(batch.lines) - done - failed
        ended = batch.ended_at is not None
        counts = {"processing": 0 if ended else rest, "canceled": rest if ended else 0, "expired": 0}
        status = "ended" if ended else "canceling" if batch.cancelled_at else "in_progress"
        url = f"{str(http.base_url).rstrip('/')}{_MESSAGES}/{batch.id}/results"
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {**counts, "succeeded": done, "errored": failed},
            "created_at": _iso(batch.made_at),
            "expires_at": _iso(batch.made_at + _DAY_S),
            "ended_at": _iso(batch.ended_at),
            "cancel_initiated_at": _iso(batch.cancelled_at),
            "archived_at": None,
            "results_url": url if ended else None,
        }
    was_cancelled = batch.cancelled_at is not None
    status = "cancelling" if was_cancelled else "in_progress"
    if batch.ended_at is not None:
        status = "cancelled" if was_cancelled else "completed"
    ended_at = None if batch.ended_at is None else int(batch.ended_at)
    return {
        "id": batch.id,
        "object": "batch",
        **batch.asked,
        "errors": None,
        "status": status,
        "output_file_id": batch.files.get("output_file_id"),
        "error_file_id": batch.files.get("error_file_id"),
        "created_at": int(batch.made_at),
        "in_progress_at": int(batch.made_at),
        "completed_at": None if was_cancelled else ended_at,
        "cancelled_at": ended_at if was_cancelled else None,
        "request_counts": {"total": len(batch.lines), "completed": done, "failed": failed},
    }


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
