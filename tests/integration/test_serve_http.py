"""HTTP that is malformed, ambiguous or not supported, sent byte by byte; and bugs in the log."""

from __future__ import annotations

import http.client
import io
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.requests import Event, Request
from edgespec.engine.sequence import TextSequence
from edgespec.engine.sequence_maker import SequenceMaker
from tests.serving import CHAT, RESPONSE, TEXT, Running, end_of, load, serving, started
from tests.tiny import write_tiny
from tests.waiting import PATIENCE_S, wait_until

BODY = b'{"prompt": "Once", "max_tokens": 2}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smol_path: Path, shared_cache: Path) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", "llama", smol_path)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with serving(partial(load, model)) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Running]:
    with serving(partial(load, model), api_key="secret") as running:
        yield running


def head(*fields: str, line: str = f"POST {TEXT} HTTP/1.1") -> bytes:
    return "\r\n".join([line, "Host: localhost", "Content-Type: application/json", *fields, "", ""]).encode()


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class Replies(io.BytesIO):
    """Data received on a connection, for one HTTPResponse after another."""

    def makefile(self, _mode: str) -> Replies:
        return self

    def close(self) -> None:
        pass


def exchange(server: Running, data: bytes) -> list[tuple[int, Any]]:
    """Status and body of every answer on one connection, until the server closes it."""
    received = b""
    with server.connect() as client:
        client.socket.sendall(data)
        while piece := client.socket.recv(65536):
            received += piece
    replies, answers = Replies(received), []
    while replies.tell() < len(received):
        answer = http.client.HTTPResponse(replies)  # type: ignore[arg-type]
        answer.begin()
        body = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        answers.append((answer.status, json.loads(body) if is_json else body))
    return answers


CLOSE = "Connection: close"
SMUGGLED = head("Content-Length: 0", line="GET /v1/models HTTP/1.1")


def test_bodies_that_are_stated_once_are_taken(server: Running) -> None:
    for data in (
        head(f"Content-Length: {len(BODY)}", CLOSE) + BODY,
        head("Transfer-Encoding: chunked", CLOSE) + chunked(BODY),
        head("Transfer-Encoding: chunked", CLOSE) + chunked(BODY[:7], BODY[7:]),
    ):
        ((status, answer),) = exchange(server, data)
        assert status == 200, answer


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ([f"Content-Length: {len(BODY)}", "Content-Length: 0"], BODY + SMUGGLED),
        (["Content-Length: 0", f"Content-Length: {len(BODY)}"], BODY + SMUGGLED),
        (["Content-Length: +5"], BODY),
        (["Transfer-Encoding: chunked, chunked"], chunked(BODY)),
        (["Transfer-Encoding: xchunked"], chunked(BODY)),
    ],
)
def test_an_unclear_length_is_refused(server: Running, fields: list[str], body: bytes) -> None:
    ((status, _),) = exchange(server, head(*fields) + body)  # and what follows is no request
    assert status in (400, 501)


MALFORMED = [b"zz\r\n" + BODY, b"5\r\nabcdefgh\r\n0\r\n\r\n", b"-5\r\nabcde\r\n0\r\n\r\n"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_malformed_body_is_one_line_in_the_log(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with started(model, "--context", "256", "--draft", "none", "--log", log) as (server, program):
        for body in MALFORMED:
            answers = exchange(server, head("Transfer-Encoding: chunked") + body)
            assert [status for status, _ in answers] == [400]
            # In pieces, with the request already waiting for its body.
            with server.connect() as client:
                client.socket.sendall(head("Transfer-Encoding: chunked") + chunked(BODY[:5])[:-5])
                assert server.get("/health")[0] == 200
                client.socket.sendall(body)
                assert client.socket.recv(65536).startswith(b"HTTP/1.1 400 ")
                assert client.is_closed()
        # Of a request whose body nobody reads.
        data = head("Transfer-Encoding: chunked", line="GET /health HTTP/1.1") + MALFORMED[0]
        assert next(status for status, _ in exchange(server, data)) in (200, 400)
        assert server.text()
        program.send_signal(signal.SIGTERM)
        code, told = end_of(program)
    assert code == 0
    assert not re.search("traceback|exception|error", told, re.IGNORECASE), told
    statuses = [json.loads(line)["status"] for line in log.read_text().splitlines()]
    assert statuses == [499] * 2 * len(MALFORMED) + [200]


@pytest.mark.parametrize(
    ("origins", "host", "status"),
    [
        (["http://localhost:{port}"], "localhost:{port}", 200),
        (["http://LOCALHOST:{port}"], "localhost:{port}", 200),
        (["https://localhost:{port}"], "localhost:{port}", 403),
        (["http://localhost:1"], "localhost:{port}", 403),
        (["http://localhost"], "localhost:80", 200),
        (["http://localhost"], "localhost", 200),
        (["https://localhost"], "localhost", 403),
        (["http://evil.example@localhost:{port}"], "localhost:{port}", 403),
        (["http://localhost:x"], "localhost:{port}", 403),
        (["null"], "localhost:{port}", 403),
        (["http://evil.example", "http://localhost:{port}"], "localhost:{port}", 400),
        (["http://localhost:{port}", "http://evil.example"], "localhost:{port}", 400),
        (["http://localhost:{port}", "http://localhost:{port}"], "localhost:{port}", 400),
    ],
)
def test_an_origin_is_scheme_host_and_port(
    server: Running, origins: list[str], host: str, status: int
) -> None:
    fields = [f"Host: {host}", *(f"Origin: {origin}" for origin in origins), CLOSE]
    data = "\r\n".join(["GET /v1/models HTTP/1.1", *fields, "", ""]).format(port=server.port).encode()
    ((found, answer),) = exchange(server, data)
    assert found == status, answer


def test_a_proxy_that_ends_tls_says_so(server: Running) -> None:
    fields = ["Host: chat.example", "Origin: https://chat.example", CLOSE]
    for more, status in (([], 403), (["X-Forwarded-Proto: https"], 200)):
        data = "\r\n".join(["GET /v1/models HTTP/1.1", *fields, *more, "", ""]).encode()
        ((found, answer),) = exchange(server, data)
        assert found == status, answer


@pytest.mark.parametrize(
    ("line", "status"),
    [("POST /v2/messages", 404), ("GET /v1/threads", 404), (f"GET {CHAT}", 405), ("POST /health", 405)],
)
def test_what_is_not_served_names_what_is(server: Running, line: str, status: int) -> None:
    ((found, answer),) = exchange(server, head("Content-Length: 0", CLOSE, line=f"{line} HTTP/1.1"))
    said = answer["error"]["message"]
    assert found == status
    assert said.startswith(f"Not supported: {line}; routes: POST {CHAT}, ")
    routes = said.removesuffix(".").partition("routes: ")[2].split(", ")
    assert {f"POST {CHAT}", f"POST {TEXT}", f"POST {RESPONSE}", "GET /v1/models", "GET /health"} <= {*routes}
    for route in routes:
        method, _, path = route.partition(" ")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        connection.request(method, path.replace("{model}", "model"))
        unserved = (405, 501) if "{id}" in path else (404, 405, 501)
        assert connection.getresponse().status not in unserved, route
        connection.close()


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/models", "/v1/models"),
        ("/v1/v1/models", "/v1/models"),
        ("/health/", "/health"),
        ("/v1/models//model", "/v1/models/model"),
    ],
)
def test_paths_that_clients_join_wrongly_are_served(server: Running, path: str, meant: str) -> None:
    assert server.get(path) == server.get(meant)
    assert server.get(path)[0] == 200


def test_answers_are_served_without_v1(server: Running) -> None:
    for path in ("/completions", "//v1//completions/"):
        status, answer = server.post(path, {"prompt": "Once", "max_tokens": 2})
        assert status == 200, answer
    assert server.get("/v1")[0] == server.get("/v1/metrics")[0] == 404


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (200, ["Authorization: Bearer secret"]),
        (200, ["authorization: bearer secret"]),
        (200, ["Authorization: BEARER   secret "]),
        (200, ["x-api-key: secret"]),
        (200, ["api-key: secret"]),
        (200, ["Authorization: Bearer secret", "x-api-key: other"]),
        (200, ["Authorization: Bearer other", "x-api-key: secret"]),
        (401, ["Authorization: Bearer other", "x-api-key: another"]),
        (401, ["Authorization: Basic secret"]),
        (401, ["Authorization: Bearer"]),
        (401, ["x-api-key:"]),
        (401, []),
    ],
)
def test_keys_as_clients_send_them(guarded: Running, status: int, fields: list[str]) -> None:
    for path in ("/v1/models", "//models/"):
        ((found, _),) = exchange(guarded, head(*fields, CLOSE, line=f"GET {path} HTTP/1.1"))
        assert found == status


def test_answers_belong_to_the_key_that_asked(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the server asks for none: a proxy in front of it may."""
    owners = []
    begin = SequenceMaker.for_request

    def noted(self: SequenceMaker, request: Request) -> TextSequence:
        owners.append(request.owner)
        return begin(self, request)

    monkeypatch.setattr(SequenceMaker, "for_request", noted)
    for fields in (["x-api-key: one"], ["Authorization: Bearer one"], ["x-api-key: two"], []):
        length = f"Content-Length: {len(BODY)}"
        ((status, _),) = exchange(server, head(*fields, length, CLOSE) + BODY)
        assert status == 200
    assert owners[0] == owners[1]
    assert len(set(owners)) == 3


# Bugs


class Broken(Exception):
    """Stands for a bug."""


def test_a_bug_in_a_pass_is_logged_and_the_model_reloaded(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its type and traceback are in the log at the level that is usual; others are told to come back."""
    gate = threading.Event()
    loads: list[int] = []

    def loading() -> Engine:
        loads.append(1)
        if len(loads) > 1:
            gate.wait(PATIENCE_S)
            return load(model)
        engine = load(model)
        answer = engine.stream_many

        def failing(*arguments: Any, **more: Any) -> Iterator[Event]:
            yield next(answer(*arguments, **more))
            raise KeyError(-2)

        monkeypatch.setattr(engine, "stream_many", failing)
        return engine

    with serving(loading, parallel=2) as server:
        status, answer = server.post(TEXT, {"prompt": "Once", "max_tokens": 4})
        assert (status, answer["error"]["message"]) == (500, "This is a bug in EdgeSpec: KeyError: -2.")
        wait_until(lambda: len(loads) > 1)
        for stream in (False, True):
            with server.connect() as client:
                client.send(TEXT, {"prompt": "Once", "stream": stream})
                reply = http.client.HTTPResponse(client.socket)
                reply.begin()
                assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
                assert json.loads(reply.read())["error"] == {
                    "message": "The model is being reloaded after a failure: This is a bug in EdgeSpec: "
                    "KeyError: -2. Try again in 5 seconds.",
                    "type": "server_error",
                    "param": None,
                    "code": "model_unavailable",
                }
        assert "KeyError: -2" in server.get("/health")[1]["reason"]
        gate.set()
        while server.get("/health")[0] != 200:
            pass
        assert server.text()
    logged = capfd.readouterr().err
    assert logged.count("Traceback (most recent call last)") == 1
    assert logged.count("KeyError: -2") >= 2
    assert "in failing" in logged
    assert server.told[0] == (
        "The model failed and is being reloaded: This is a bug in EdgeSpec: KeyError: -2."
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_beside_the_model_is_logged_too(
    model: Path, stream: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Broken("no answer")

    name = "piece" if stream else "whole"
    monkeypatch.setattr(f"edgespec.api.protocol.CompletionBuilder.{name}", fail)
    with serving(partial(load, model)) as server, server.connect() as client:
        client.send(TEXT, {"prompt": "Once", "max_tokens": 2, "stream": stream})
        reply = http.client.HTTPResponse(client.socket)
        reply.begin()
        assert b"This is a bug in EdgeSpec: Broken: no answer." in reply.read()
    logged = capfd.readouterr().err
    assert logged.count("Traceback (most recent call last)") == 1
    assert "Broken: no answer" in logged
    assert "in fail" in logged
