"""While a long prompt is read, clients of every API are told so, in a way that breaks none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, Running, load, serving

LONG: Any = [{"role": "user", "content": "The river was high that spring. " * 60 + "Why?"}]


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    with serving(lambda: load(short_path, context=1024), parallel=2) as server:
        yield server


def streamed(server: Running, path: str, **body: object) -> bytes:
    """Everything that is sent to a client that asks for a stream."""
    with server.connect() as client:
        client.send(path, {"model": "model", "messages": LONG, "stream": True, "max_tokens": 4, **body})
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = client.socket.recv(65536)
            assert piece, received
            received += piece
        return received


def test_comments_tell_tokens_and_seconds_to_clients_of_openai(server: Running) -> None:
    told = streamed(server, CHAT, seed=1)

    assert b": reading the prompt: " in told
    progress = told.partition(b": reading the prompt: ")[2].partition(b"\n\n")[0].decode()
    read, of, total, *rest = progress.split()
    assert (of, rest[0], rest[-2:]) == ("of", "tokens,", ["s", "left"])
    assert 0 < int(read) < int(total)
    with server.openai() as client:
        pieces = list(
            client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": LONG[0]["content"] + "!"}],
                stream=True,
                max_tokens=4,
            )
        )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


@pytest.mark.slow
def test_pings_come_before_the_answer_to_clients_of_anthropic(server: Running) -> None:
    with server.anthropic() as client:
        messages: Any = [{"role": "user", "content": "Listen. " + LONG[0]["content"]}]
        events = list(client.messages.create(model="model", messages=messages, max_tokens=4, stream=True))
    kinds = [event.type for event in events]
    assert kinds[-1] == "message_stop"
    raw = streamed(
        server, "/v1/messages", messages=[{"role": "user", "content": "Hm. " + LONG[0]["content"]}]
    )
    before, begun, _ = raw.partition(b"event: content_block_start")
    assert begun
    assert before.count(b"event: ping") >= 2, "one as the message starts, and one while the prompt is read"


def test_clients_of_ollama_get_lines_that_say_nothing(server: Running) -> None:
    with server.ollama() as client:
        messages: Any = [{"role": "user", "content": "So. " + LONG[0]["content"]}]
        lines = list(client.chat("model", messages, stream=True, options={"num_predict": 4}))
        whole = client.chat("model", messages, options={"num_predict": 4})
    assert not lines[0].message.content
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
