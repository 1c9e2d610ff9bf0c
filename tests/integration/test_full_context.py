"""A context that is full: refused with the numbers in the form of each API, never cut in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.serving import Running, load, serving

CONTEXT = 128
LONG: Any = [{"role": "user", "content": "The river was high that spring. " * 40}]
SHORT: Any = [{"role": "user", "content": "Tell me a long story."}]


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    with serving(lambda: load(short_path, context=CONTEXT)) as server:
        yield server


def test_openai(server: Running) -> None:
    with server.openai() as client:
        asks: list[Any] = [
            lambda **more: client.chat.completions.create(model="model", messages=LONG, **more),
            lambda **more: client.responses.create(model="model", input=LONG[0]["content"], **more),
            lambda **more: client.completions.create(model="model", prompt=LONG[0]["content"], **more),
        ]
        for ask in asks:
            for more in ({}, {"stream": True}):
                with pytest.raises(
                    openai.BadRequestError, match=rf"\d+ tokens.* {CONTEXT} tokens"
                ) as refused:
                    ask(**more)
                assert refused.value.code == "context_length_exceeded"
        answer = client.chat.completions.create(model="model", messages=SHORT, max_tokens=4 * CONTEXT)
        assert answer.usage is not None
        if answer.usage.total_tokens >= CONTEXT:
            assert answer.choices[0].finish_reason == "length"


def test_anthropic(server: Running) -> None:
    with server.anthropic() as client:
        for more in ({}, {"stream": True}):
            create: Any = client.messages.create
            with pytest.raises(
                anthropic.BadRequestError, match=rf"prompt is too long.*\d+ tokens.* {CONTEXT} tokens"
            ) as refused:
                create(model="model", messages=LONG, max_tokens=8, **more)
            body: Any = refused.value.body
            assert body["error"]["type"] == "invalid_request_error"
        answer = client.messages.create(model="model", messages=SHORT, max_tokens=4 * CONTEXT)
        if answer.usage.input_tokens + answer.usage.output_tokens >= CONTEXT:
            assert answer.stop_reason == "model_context_window_exceeded"


def test_ollama(server: Running) -> None:
    with server.ollama() as client:
        for stream in (False, True):
            chat: Any = client.chat
            with pytest.raises(ollama.ResponseError, match=rf"\d+ tokens.* {CONTEXT} tokens") as refused:
                list(chat("model", LONG, stream=stream))
            assert refused.value.status_code == 400
            with pytest.raises(ollama.ResponseError, match=rf"\d+ tokens.* {CONTEXT} tokens"):
                list(client.generate("model", LONG[0]["content"], stream=True))
        answer = client.chat("model", SHORT, options={"num_predict": 4 * CONTEXT})
        if answer.prompt_eval_count + answer.eval_count >= CONTEXT:
            assert answer.done_reason == "length"
