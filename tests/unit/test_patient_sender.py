"""Streams of answers whose model is not there yet: signs of life, and an error if there will be no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from edgespec.serving import model_router
from edgespec.serving.model_router import PatientSender
from edgespec.serving.pulling import AskedModel

_Message = MutableMapping[str, Any]


def _sent(path: str, seconds: float, *answer: _Message, streams: bool | None = True) -> list[_Message]:
    """What a client gets of an answer that begins after so many seconds."""
    sent: list[_Message] = []

    async def send(message: _Message) -> None:
        sent.append(message)

    async def work() -> None:
        sender = PatientSender({"type": "http", "path": path}, send)
        sender.expect(AskedModel(model="a", stream=streams))
        async with sender.signs_of_life():
            await asyncio.sleep(seconds)
            for message in answer:
                await sender(message)

    asyncio.run(work())
    return sent


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_router, "_SIGN_OF_LIFE_S", 0.02)


_START: _Message = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}
_PIECE: _Message = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": False}
_REFUSED: _Message = {"type": "http.response.start", "status": 503, "headers": []}
_REASON: _Message = {"type": "http.response.body", "body": b'{"error": {}}'}


def test_an_answer_that_comes_at_once_is_passed_on() -> None:
    assert _sent("/v1/chat/completions", 0, _START, _PIECE) == [_START, _PIECE]


def test_a_stream_that_waits_begins_with_comments() -> None:
    start, *comments, last = _sent("/v1/chat/completions", 0.2, _START, _PIECE)
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert {(one["body"][:1], one["more_body"]) for one in comments} == {(b":", True)}
    assert last == _PIECE


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/messages", b"event: error\n"), ("/v1/chat/completions", b"")]
)
def test_a_refusal_behind_comments_is_an_event(path: str, name: bytes) -> None:
    start, *_, last = _sent(path, 0.2, _REFUSED, _REASON)
    assert start["status"] == 200
    assert last["body"] == name + b'data: {"error": {}}\n\n'


@pytest.mark.parametrize(("path", "text"), [("/api/generate", "response"), ("/api/chat", "message")])
def test_streams_of_ollama_begin_with_lines_without_text(path: str, text: str) -> None:
    start, *lines, last = _sent(path, 0.2, _REFUSED, _REASON, streams=None)
    assert start["status"] == 200
    for line in (json.loads(one["body"]) for one in lines):
        assert (line["model"], line["done"]) == ("a", False)
        assert line[text] in ("", {"role": "assistant", "content": ""})
    assert last["body"] == b'{"error": {}}\n'


@pytest.mark.parametrize(
    ("path", "streams"), [("/api/chat", False), ("/api/embed", None), ("/v1/chat/completions", False)]
)
def test_answers_that_are_not_streamed_wait_for_their_status(path: str, streams: bool | None) -> None:
    assert _sent(path, 0.2, _REFUSED, _REASON, streams=streams) == [_REFUSED, _REASON]
