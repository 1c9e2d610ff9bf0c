"""Clients that leave, models that fail, and the end of the server."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgespec.api.limits import Limits
from edgespec.engine.engine import Engine
from edgespec.errors import MemoryLimitError
from edgespec.files.user_folders import cache_folder
from edgespec.text.encoding import Encoder
from edgespec.text.template import ChatTemplate
from tests.serving import CHAT, TEXT, Client, Running, end_of, load, serving, started
from tests.tiny import write_tiny
from tests.waiting import PATIENCE_S, wait_until

LONG = {"prompt": "la " * 100, "max_tokens": 3000}  # it repeats itself
SHORT = {"prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    """One is answered, one may wait, and an answer may take minutes."""
    with serving(partial(load, short_path, 4096), waiting=1) as running:
        yield running


@contextlib.contextmanager
def a_long_answer(server: Running) -> Iterator[Client]:
    """A client whose stream has begun, and takes long: in the end it has not ended."""
    with server.connect() as client:
        client.send(TEXT, LONG | {"stream": True})
        received = b""
        while b'"text"' not in received:
            received += client.socket.recv(65536)
        yield client
        if client.socket.fileno() >= 0:
            client.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while piece := client.socket.recv(65536):
                    received += piece
            assert b"[DONE]" not in received


def queued(server: Running) -> float:
    """The number of waiting requests."""
    return server.figures()["edgespec_queue_length"]


def waits(server: Running, client: Client, *, stream: bool = False) -> bool:
    """Send a short request where nobody waits; whether it takes a place in the queue."""
    client.send(TEXT, SHORT | {"stream": stream})
    wait_until(lambda: queued(server) or select.select([client.socket], [], [], 0)[0])
    if queued(server):
        return True
    received = client.socket.recv(65536)
    assert received.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429"))
    return received.startswith(b"HTTP/1.1 200")


def has_room(server: Running) -> bool:
    with server.connect() as client:
        found = waits(server, client)
    wait_until(lambda: not queued(server))
    return found


def answers_again(server: Running) -> bool:
    """True if an ordinary request is answered; it may find no place for a moment."""
    status, answer = server.post(TEXT, SHORT)
    assert status in (200, 429), answer
    return status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_who_leaves_the_queue_keeps_nobody_waiting(server: Running, stream: bool, resets: bool) -> None:
    with a_long_answer(server):
        wait_until(lambda: not queued(server))  # those before have left
        waiting = server.connect()
        while not waits(server, waiting, stream=stream):
            waiting.socket.close()
            waiting = server.connect()
        assert server.post(TEXT, SHORT)[0] == 429, "there is one place"
        if resets:
            waiting.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        waiting.socket.close()
        wait_until(lambda: not queued(server))
        wait_until(lambda: has_room(server))
    wait_until(lambda: answers_again(server))


def test_who_leaves_an_answer_keeps_nobody_waiting(server: Running) -> None:
    with a_long_answer(server) as client:
        client.socket.close()
    wait_until(lambda: answers_again(server))
    for _ in range(3):
        client = server.connect()
        client.send(TEXT, LONG)
        client.socket.close()  # while the request is being prepared, or the answer has just begun
    wait_until(lambda: answers_again(server))


def test_health_is_told_while_a_request_is_prepared(short_path: Path) -> None:
    """Nobody else waits for a template that takes long, here until all others are answered."""
    asked, answered = threading.Event(), threading.Event()

    class Slow(ChatTemplate):
        def render(self, *arguments: Any, **more: Any) -> str:
            assert not asked.is_set() or answered.wait(PATIENCE_S)
            return super().render(*arguments, **more)

    def with_slow_template() -> Engine:
        engine = load(short_path)
        many = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        engine.encoder.close()
        engine.encoder = Encoder(engine.target.model.vocabulary, Slow(many, "", "", timeout_s=0.1))
        return engine

    with serving(with_slow_template) as server, server.connect() as slow:
        asked.set()
        slow.send(CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
        for _ in range(3):
            assert server.get("/health") == (200, {"status": "ok"})
        assert server.text()
        answered.set()
        status, answer = slow.answer()
        assert status == 400
        assert "did not finish within" in answer["error"]["message"]


def streamed(model: Path, context: int = 256, **more: Any) -> Engine:
    """A model in as little memory as it can do with."""
    memory = 64 << 20
    while True:
        try:
            return load(model, context, offload="stream", memory=memory, **more)
        except MemoryLimitError as error:
            if error.least is None or error.least <= memory:
                raise
            memory = error.least


@pytest.mark.slow
def test_a_damaged_pack_is_told_and_made_anew(short_q4_path: Path) -> None:
    gate = threading.Event()
    loads = []

    def loading() -> Engine:
        loads.append(1)
        if len(loads) > 1:
            gate.wait(PATIENCE_S)
        return streamed(short_q4_path, pack="always")

    with serving(partial(streamed, short_q4_path, pack="always")) as untouched:
        expected = untouched.text()
    with serving(loading) as server:
        [pack] = [path for path in (cache_folder() / "packs").iterdir() if path.suffix != ".lock"]
        size = pack.stat().st_size
        with pack.open("r+b") as file:
            for place in range(size // 4, size, 4096):
                file.seek(place)
                file.write(b"damaged!")
            file.flush()
            os.fsync(file.fileno())
        status, answer = server.post(TEXT, SHORT)
        assert status == 500
        assert pack.name in answer["error"]["message"]
        status, health = server.get("/health")
        assert (status, health["status"]) == (503, "unavailable")
        assert health["reason"] == answer["error"]["message"]
        status, answer = server.post(TEXT, SHORT)
        assert (status, answer["error"]["code"]) == (503, "model_unavailable")
        gate.set()
        wait_until(lambda: server.get("/health")[0] == 200)
        assert server.text() == expected
        assert [line.split(":")[0] for line in server.told] == [
            "The model failed and is being reloaded",
            "Reloaded the model.",
        ]


@pytest.mark.slow
def test_loading_again_is_tried_until_it_works(tmp_path: Path, short_q4_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(short_q4_path, model)
    with serving(partial(streamed, model, pack="never")) as server:
        expected = server.text()
        away = model.rename(tmp_path / "away.gguf")
        model.write_bytes(b"")
        # The open file is still whole, and so is cut as well.
        os.truncate(away, away.stat().st_size // 2)
        status, answer = server.post(TEXT, SHORT)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        wait_until(lambda: server.get("/health")[0] == 503)
        assert server.post(TEXT, SHORT)[0] == 503
        shutil.copy(short_q4_path, model)
        wait_until(lambda: server.get("/health")[0] == 200)
        assert server.text() == expected


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_client_that_leaves_while_it_sends_is_no_news(short_path: Path) -> None:
    with started(short_path, "--context", "256", "--draft", "none") as (server, program):
        for cut in (1, 400_000):
            with server.connect() as client:
                client.begin(TEXT, 800_000)
                client.socket.sendall(b" " * cut)
        with server.connect() as client:
            client.begin(TEXT, 800_000)
            client.socket.sendall(b" ")
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with server.connect() as client:
            client.socket.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
            assert client.is_closed()
        assert server.text()
        program.send_signal(signal.SIGTERM)
        assert end_of(program) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM, signal.SIGTERM], 0),
        pytest.param([signal.SIGINT], 130, marks=pytest.mark.slow),
    ],
)
def test_the_end_comes_at_once_and_in_order(short_path: Path, numbers: list[int], code: int) -> None:
    with started(short_path, "--context", "4096", "--draft", "none", "--parallel", "1", "--queue", "4") as (
        server,
        program,
    ):
        with a_long_answer(server) as stream, server.connect() as waiting, server.connect() as uploading:
            waiting.send(TEXT, SHORT)
            wait_until(lambda: queued(server))  # a request that has not arrived is not answered
            uploading.begin(TEXT, 1000)
            for number in numbers:
                program.send_signal(number)
                wait_until(lambda: not is_open(server))
            status, answer = waiting.answer()
            assert (status, answer["error"]["message"]) == (503, "The server is shutting down.")
            received = b""
            while piece := stream.socket.recv(65536):
                received += piece
            assert b"The server is shutting down." in received
            assert uploading.is_closed()
        assert end_of(program) == (code, "")


def is_open(server: Running) -> bool:
    """True if new connections are accepted."""
    with contextlib.suppress(ConnectionError):
        server.connect().socket.close()
        return True
    return False


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_after_sigterm_answers_in_progress_are_completed(short_path: Path) -> None:
    with started(short_path, "--context", "512", "--draft", "none", "--parallel", "1") as (server, program):
        with server.connect() as stream, server.connect() as waiting, server.connect() as late:
            late.socket.sendall(b"POST ")  # an open connection
            stream.send(TEXT, LONG | {"prompt": "la", "max_tokens": 200, "stream": True, "ignore_eos": True})
            received = stream.socket.recv(65536)
            waiting.send(TEXT, SHORT)
            wait_until(lambda: queued(server))
            program.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_open(server))
            late.socket.sendall(
                f"{TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode()
            )
            assert late.answer()[1]["error"]["message"] == "The server is shutting down."
            while piece := stream.socket.recv(65536):
                received += piece
            assert b"[DONE]" in received
            assert waiting.answer()[0] == 200
        assert end_of(program) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_model_without_a_template_completes_texts(tmp_path: Path, short_path: Path) -> None:
    model = write_tiny(tmp_path / "plain.gguf", "llama", short_path)
    with started(model, "--context", "256", "--draft", "none") as (server, program):
        status, answer = server.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
        assert "only /v1/completions is served" in answer["error"]["message"]
        assert server.post(TEXT, SHORT)[0] == 200
        program.send_signal(signal.SIGTERM)
        _, told = end_of(program)
    assert told.startswith("The model has no chat template: /v1/completions is served")


@pytest.mark.slow
def test_rude_clients_change_nothing(short_path: Path) -> None:
    """Each kind of them several times over and at once; then the text is that of an untouched server."""
    with serving(partial(load, short_path)) as untouched:
        expected = untouched.text(max_tokens=24)
    limits = Limits(body=1 << 20, body_s=PATIENCE_S)
    process = psutil.Process()
    with serving(partial(load, short_path), limits, waiting=4) as server:
        assert server.text(max_tokens=24) == expected
        descriptors = process.num_fds()
        threads = process.num_threads()
        crowd = [
            threading.Thread(target=_rude, args=(server, rudeness))
            for rudeness in _RUDENESS
            for _ in range(4)
        ]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert server.get("/health") == (200, {"status": "ok"})
        wait_until(lambda: server.post(TEXT, SHORT)[0] == 200)
        assert server.text(max_tokens=24) == expected
        wait_until(lambda: process.num_fds() <= descriptors and process.num_threads() <= threads + 1)
    assert server.told == []


def _rude(server: Running, rudeness: Callable[[Client], Any]) -> None:
    for _ in range(3):
        with (
            contextlib.suppress(ConnectionError, http.client.HTTPException, ValueError),
            server.connect() as client,
        ):
            client.socket.settimeout(PATIENCE_S)
            rudeness(client)


def _says_nothing(client: Client) -> None:
    time.sleep(0.2)


def _asks_and_leaves(client: Client) -> None:
    client.send(TEXT, LONG)


def _asks_for_a_stream_and_does_not_read(client: Client) -> None:
    client.send(TEXT, LONG | {"stream": True})
    time.sleep(0.5)


def _stops_sending(client: Client) -> None:
    client.begin(TEXT, 900_000)
    client.socket.sendall(b"[" * 500_000)


def _sends_empty_objects(client: Client) -> None:
    client.send(CHAT, b'{"messages":[' + b"{}," * 300_000 + b"{}]}")
    assert client.answer()[0] in (400, 429, 503)


def _nests(client: Client) -> None:
    client.send(CHAT, b'{"messages":' + b"[" * 900_000)
    assert client.answer()[0] in (400, 429, 503)


def _asks_twice_at_once(client: Client) -> None:
    client.send(TEXT, SHORT)
    client.send(TEXT, SHORT)
    client.socket.shutdown(socket.SHUT_WR)
    assert client.is_closed()


def _speaks_in_tongues(client: Client) -> None:
    client.socket.sendall(os.urandom(4096) + b"\r\n\r\n")
    assert client.is_closed()


def _wants_a_large_grammar(client: Client) -> None:
    words = " | ".join(f'"word {i}"' for i in range(2000))
    client.send(TEXT, SHORT | {"grammar": f"root ::= {words}"})


_RUDENESS = [
    _says_nothing,
    _asks_and_leaves,
    _asks_for_a_stream_and_does_not_read,
    _stops_sending,
    _sends_empty_objects,
    _nests,
    _asks_twice_at_once,
    _speaks_in_tongues,
    _wants_a_large_grammar,
]
