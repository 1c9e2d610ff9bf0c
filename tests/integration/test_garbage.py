"""Answers leave nothing large to the garbage collector, which counts objects and not their megabytes.

Noise, logits and prompts that wait for its next run would add up to gigabytes in a server. So no object of an
answer or a request may be in a cycle; those of libraries are small.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.api.completion_request import CompletionRequest
from edgespec.engine.answer import Answer
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.serving import model_worker
from edgespec.serving.engine_worker import PendingAnswer
from edgespec.serving.request_bodies import RequestBody
from edgespec.serving.response_sender import ResponseSender
from tests.serving import CHAT, TEXT, Running, load, serving
from tests.waiting import wait_until

_SAMPLED = GenerationConfig(max_tokens=6, temperature=1.0, seed=1, logprobs=2)
_OBJECT = Grammar.of_schema({"type": "object", "properties": {"a": {"type": "string"}}})

_ANSWERS: dict[str, Callable[[Engine], object]] = {
    "greedy": lambda engine: engine.generate("Once", GenerationConfig(max_tokens=6)),
    "sampled": lambda engine: engine.generate("Once", _SAMPLED),
    "several": lambda engine: engine.generate_many(["Once", "Twice"], _SAMPLED),
    "a form": lambda engine: engine.generate("Once", GenerationConfig(max_tokens=6, grammar=_OBJECT)),
    "scores": lambda engine: engine.score(["Once upon a time"]),
    "left": lambda engine: _left(engine),
}


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(short_path, context=256, threads=1) as engine:
        yield engine


def _left(engine: Engine) -> None:
    answer = engine.stream("Once", _SAMPLED)
    next(answer)
    answer.close()


@pytest.mark.parametrize("kind", _ANSWERS)
def test_an_answer_is_freed_when_it_ends(engine: Engine, kind: str) -> None:
    answer = _ANSWERS[kind]
    answer(engine)  # what is made once
    assert [type(found) for found in _garbage(lambda: answer(engine))] == []


def _garbage(work: Callable[[], object]) -> list[Any]:
    """The arrays, and the objects of EdgeSpec, that some work leaves to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [found for found in gc.garbage if issubclass(type(found), np.ndarray) or _is_ours(found)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return kept


def _is_ours(found: object) -> bool:
    return type(found).__module__.startswith("edgespec")


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    with serving(lambda: load(short_path), parallel=2) as running:
        yield running


_CHAT = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4}
_REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a text": (TEXT, {"prompt": "Once", "max_tokens": 4, "temperature": 1}, 200),
    "a chat": (CHAT, _CHAT, 200),
    "several answers": (CHAT, _CHAT | {"n": 2, "temperature": 1}, 200),
    "without meaning": (CHAT, _CHAT | {"temperature": "hot"}, 400),
    "too long": (TEXT, {"prompt": "word " * 3000}, 400),
    "a wrong grammar": (TEXT, {"prompt": "Once", "grammar": "root ::= other"}, 400),
}


@pytest.mark.parametrize("kind", _REQUESTS)
def test_a_request_is_freed_when_it_was_answered(server: Running, kind: str) -> None:
    path, body, status = _REQUESTS[kind]
    gc.collect()
    gc.disable()
    try:
        assert server.post(path, body)[0] == status
        wait_until(lambda: _held() == [], _held)
    finally:
        gc.enable()


def test_a_stream_is_freed_when_its_client_has_left(server: Running) -> None:
    gc.collect()
    gc.disable()
    try:
        with server.connect() as client:
            client.send(CHAT, _CHAT | {"stream": True, "max_tokens": 200})
            client.socket.recv(100)
        wait_until(lambda: _held() == [], _held)
    finally:
        gc.enable()


def test_free_memory_is_returned_when_nothing_is_left_to_do(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    monkeypatch.setattr(model_worker, "release_free_memory", lambda: released.append(True))
    for _ in range(2):
        before = len(released)
        server.text()
        wait_until(lambda before=before: len(released) > before)


def _held() -> list[str]:
    """What exists of requests and their answers."""
    kinds = (CompletionRequest, PendingAnswer, RequestBody, ResponseSender, Answer)
    # By type: isinstance asks lazy modules of other packages for their class.
    return [type(found).__name__ for found in gc.get_objects() if issubclass(type(found), kinds)]
