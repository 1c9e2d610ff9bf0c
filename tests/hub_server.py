"""A server on loopback that speaks the part of the Hub's API that is used, and can fail in every way.

Addresses and headers are the Hub's: /api/models/ORG/REPO?blobs=true, /ORG/REPO/resolve/REVISION/PATH with
X-Repo-Commit, X-Linked-Etag and X-Linked-Size, answered by a redirect to another host (here: another port),
where the bytes are, with ranges.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LACKS = frozenset({"HEAD", "checksum", "commit", "sizes", "ranges", "endurance"})
"""What mirrors of the Hub may lack: HEAD requests; an ETag that is a checksum; X-Repo-Commit; sizes and
checksums in the list of files; ranges; connections that last longer than for a third of the bytes."""

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    """A request as it came."""

    method: str
    path: str
    host: str  # "hub", or "cdn" for what is asked of the host that has the bytes
    authorization: str | None
    range: str | None


Failure = Callable[[Request, BaseHTTPRequestHandler], bool]
"""Told of a request before it is answered; true if it has answered itself."""


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that hang up."""


@dataclass
class HubServer:
    """Repositories by name, each its files by path.

    Attributes:
        token: what a private or gated repository wants.
        sizes: bytes that are claimed for a path, in place of the true ones.
        digests: checksums that are claimed for a path, in place of the true ones.
        renamed: old names of repositories, and where they lead.
        heads: the newest commit of repositories that have moved on; `history` has the files of earlier ones.
        lacks: None for the Hub itself; some of LACKS for a mirror, which sends the bytes itself.
        headers: sent by a mirror with the bytes, in addition.
        failures: what goes wrong; the first that answers a request wins.
        requests: all that came.
        sent: bytes of files that were sent by a mirror.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_secretsecretsecret"
    sizes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    history: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    lacks: frozenset[str] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    sent: int = 0
    failures: list[Failure] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        self._hub = self._serve("hub")
        self._cdn = self._serve("cdn")
        return self

    def __exit__(self, *_: object) -> None:
        from huggingface_hub.utils import close_session  # type: ignore[attr-defined]

        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()
        close_session()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_port}"

    def downloads(self) -> list[Request]:
        """The requests for bytes."""
        return [r for r in self.requests if r.host == "cdn" and r.method == "GET"]

    def move(self, repo: str, files: dict[str, bytes]) -> str:
        """A new commit, which is returned; the files of the last one stay where its name leads."""
        head = self.heads.get(repo, COMMIT)
        self.history[repo, head] = self.repositories[repo]
        self.repositories[repo] = files
        self.heads[repo] = hashlib.sha1(head.encode()).hexdigest()
        return self.heads[repo]

    def _files(self, repo: str, revision: str) -> dict[str, bytes]:
        return self.history.get((repo, revision), self.repositories[repo])

    def _serve(self, host: str) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or the body waits until the client confirms the headers

            def do_GET(self) -> None:
                hub.answer(self, host)

            def do_HEAD(self) -> None:
                hub.answer(self, host)

            def log_message(self, *_: Any) -> None:
                pass

        server = _QuietServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def answer(self, handler: BaseHTTPRequestHandler, host: str) -> None:
        request = Request(
            handler.command,
            handler.path,
            "cdn" if self.lacks is not None and "/resolve/" in handler.path else host,
            handler.headers.get("Authorization"),
            handler.headers.get("Range"),
        )
        self.requests.append(request)
        try:
            if any(failure(request, handler) for failure in self.failures):
                return
            (self._answer_cdn if host == "cdn" else self._answer_hub)(handler, request)
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def _answer_hub(self, handler: BaseHTTPRequestHandler, request: Request) -> None:
        parts = urlsplit(request.path)
        steps = [unquote(step) for step in parts.path.strip("/").split("/")]
        if steps == ["api", "models"]:
            wanted = parse_qs(parts.query).get("search", [""])[0].lower()
            reply(handler, [{"id": name} for name in self.repositories if wanted[:6] in name.lower()])
            return
        api = steps[:2] == ["api", "models"]
        repo = "/".join(steps[2:4] if api else steps[:2])
        if repo in self.renamed:
            reply(handler, None, 307, {"Location": request.path.replace(repo, self.renamed[repo])})
            return
        known = request.authorization == f"Bearer {self.token}"
        if request.authorization and not known:
            reply(
                handler,
                {"error": "Invalid credentials"},
                401,
                {"X-Error-Message": "Invalid credentials in Authorization header"},
            )
        elif repo not in self.repositories or (repo in self.private and not known):
            reply(
                handler,
                {"error": "Repository not found"},
                401 if not known else 404,
                {"X-Error-Code": "RepoNotFound"},
            )
        elif repo in self.gated and not known:
            reply(handler, {"error": "gated"}, 401, {"X-Error-Code": "GatedRepo"})
        elif api:
            reply(handler, self._info(repo))
        else:
            self._resolve(handler, request, repo, steps[3], "/".join(steps[4:]))

    def _info(self, repo: str) -> dict[str, Any]:
        files = self.repositories[repo]
        if self.lacks and "sizes" in self.lacks:
            siblings = [{"rfilename": path} for path in files]
            return {"id": repo, "sha": self.heads.get(repo, COMMIT), "siblings": siblings}
        return {
            "id": repo,
            "sha": self.heads.get(repo, COMMIT),
            "siblings": [
                {
                    "rfilename": path,
                    "size": self.sizes.get(path, len(data)),
                    "blobId": git_hash(data),
                    **({} if path.endswith(".md") else {"lfs": {
                        "sha256": self._digest(path, data),
                        "size": self.sizes.get(path, len(data)),
                        "pointerSize": 130,
                    }}),
                }
                for path, data in files.items()
            ],
        }  # fmt: skip

    def _digest(self, path: str, data: bytes) -> str:
        known = self.digests.get(path)
        return known or (git_hash(data) if path.endswith(".md") else hashlib.sha256(data).hexdigest())

    def _resolve(
        self, handler: BaseHTTPRequestHandler, request: Request, repo: str, revision: str, path: str
    ) -> None:
        commit = self.heads.get(repo, COMMIT) if revision == "main" else revision
        data = self._files(repo, commit).get(path)
        if data is None:
            reply(handler, {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        if self.lacks is not None:
            self._send_as_mirror(handler, request, path, data, commit)
            return
        location = f"http://127.0.0.1:{self._cdn.server_port}/{repo}/{path}?at={commit}&Signature=verysecret"
        headers = {
            "Location": location,
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(self.sizes.get(path, len(data))),
            "X-Linked-Etag": f'"{self._digest(path, data)}"',
        }
        reply(handler, None, 302, headers)

    def _send_as_mirror(
        self, handler: BaseHTTPRequestHandler, request: Request, path: str, data: bytes, commit: str
    ) -> None:
        lacks = self.lacks or frozenset()
        if request.method == "HEAD" and "HEAD" in lacks:
            reply(handler, None, 405)
            return
        headers = {"ETag": '"artifact-7"' if "checksum" in lacks else f'"{self._digest(path, data)}"'}
        headers |= self.headers | ({} if "commit" in lacks else {"X-Repo-Commit": commit})
        start = int(request.range[6:].split("-")[0]) if request.range and "ranges" not in lacks else None
        left = data[start or 0 :]
        if start is not None and not left:
            reply(handler, None, 416, {**headers, "Content-Range": f"bytes */{len(data)}"})
            return
        sent = left[: -(-len(left) // 3)] if "endurance" in lacks else left
        self.sent += len(sent)
        send_bytes(handler, left, len(data), start, headers=headers, sent=len(sent))

    def _answer_cdn(self, handler: BaseHTTPRequestHandler, request: Request) -> None:
        parts = urlsplit(request.path)
        org, repo, path = unquote(parts.path).strip("/").split("/", 2)
        data = self._files(f"{org}/{repo}", parse_qs(parts.query)["at"][0])[path]
        start, end = 0, len(data)
        if request.range:
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
        send_bytes(handler, data[start:end], len(data), start if request.range else None)


def git_hash(data: bytes) -> str:
    """The name that git gives to the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def reply(
    handler: BaseHTTPRequestHandler, body: Any, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Answer with JSON."""
    data = b"" if body is None else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)


def send_bytes(
    handler: BaseHTTPRequestHandler,
    data: bytes,
    total: int,
    start: int | None = None,
    *,
    headers: dict[str, str] | None = None,
    sent: int | None = None,
) -> None:
    """Answer with a file or a range of it; hang up after `sent` bytes if these are not all."""
    handler.send_response(200 if start is None else 206)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    if start is not None:
        handler.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data[:sent])
        handler.close_connection |= sent is not None and sent < len(data)


# --- failures ------------------------------------------------------------------------------------


def on_bytes(act: Callable[[Request, BaseHTTPRequestHandler], None], times: int = 1) -> Failure:
    """Something that goes wrong with the first `times` requests for bytes."""
    left = [times]

    def fail(request: Request, handler: BaseHTTPRequestHandler) -> bool:
        if request.host != "cdn" or request.method != "GET" or left[0] == 0:
            return False
        left[0] -= 1
        act(request, handler)
        return True

    return fail


def always(act: Callable[[Request, BaseHTTPRequestHandler], None]) -> Failure:
    """Something that goes wrong with every request."""

    def fail(request: Request, handler: BaseHTTPRequestHandler) -> bool:
        act(request, handler)
        return True

    return fail


def too_short(data: bytes) -> Callable[[Request, BaseHTTPRequestHandler], None]:
    """Send `data`, say that this is all, and have nothing more to give."""

    def act(request: Request, handler: BaseHTTPRequestHandler) -> None:
        start = len(data) if request.range else None
        send_bytes(handler, b"" if start else data, len(data), start)

    return act


def cut_off(data: bytes, after: int) -> Callable[[Request, BaseHTTPRequestHandler], None]:
    """Promise all of the data, send some of it, and hang up."""

    def act(_request: Request, handler: BaseHTTPRequestHandler) -> None:
        send_bytes(handler, data, len(data), sent=after)
        handler.close_connection = True

    return act


def hang(data: bytes, after: int, seconds: float) -> Callable[[Request, BaseHTTPRequestHandler], None]:
    """Send some of the data, and then nothing, without hanging up."""

    def act(_request: Request, handler: BaseHTTPRequestHandler) -> None:
        send_bytes(handler, data, len(data), sent=after)
        time.sleep(seconds)
        handler.close_connection = True

    return act


def status(code: int, **headers: str) -> Callable[[Request, BaseHTTPRequestHandler], None]:
    """Answer with a status."""

    def act(_request: Request, handler: BaseHTTPRequestHandler) -> None:
        reply(
            handler, {"error": "no"}, code, {name.replace("_", "-"): value for name, value in headers.items()}
        )

    return act
