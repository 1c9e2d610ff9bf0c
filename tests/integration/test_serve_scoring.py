"""Prompts in front of completions, with their log-probabilities, and the tokenizer over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import edgespec
from edgespec.engine.engine import Engine
from tests.serving import TEXT, Running, serving

PROMPT = "Tea is hot, and the café is closed"


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    """The same model in this process."""
    with edgespec.load(short_path, draft="none", exact=True, context=512, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    def load() -> Engine:
        return edgespec.load(short_path, draft="lookup", exact=True, context=512, threads=1)

    with serving(load, parallel=4) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **more: Any) -> Any:
    create: Any = client.completions.create
    return create(model="model", prompt=prompt, **more)


@pytest.mark.parametrize("n_tokens", [0, 1, 5])
def test_the_prompt_has_its_log_probabilities(client: openai.OpenAI, engine: Engine, n_tokens: int) -> None:
    answer = complete(client, max_tokens=n_tokens, echo=True, logprobs=2)
    (choice,) = answer.choices
    tokens = engine.encoder.encode(PROMPT, raw=True)
    written = engine.generate(PROMPT, edgespec.GenerationConfig(max_tokens=5, logprobs=2), raw=True)
    (score,) = engine.score([PROMPT], top=2)
    expected = [*score.token_logprobs, *written.logprobs[:n_tokens]]
    assert choice.text.startswith(PROMPT)
    assert choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == [found and found.logprob for found in expected]
    assert choice.logprobs.top_logprobs[0] is None
    for top, found in zip(choice.logprobs.top_logprobs[1:], expected[1:], strict=True):
        assert found is not None
        assert list(top.values())[:2] == [other.logprob for other in found.top]
        assert found.logprob in top.values()
    lists = (choice.logprobs.tokens, choice.logprobs.text_offset)
    assert [len(each) for each in lists] == [len(tokens) + n_tokens] * 2
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, at in zip(*lists, strict=True):
        assert choice.text.startswith(token, at)
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert usage == (len(tokens), n_tokens)


def test_prompts_of_every_form(client: openai.OpenAI, engine: Engine) -> None:
    texts = ["Tea is", "Coffee is black"]
    tokens = [engine.encoder.encode(text, raw=True) for text in texts]
    settings: dict[str, Any] = {"max_tokens": 1, "echo": True, "logprobs": 0}
    by_text = complete(client, texts, **settings).choices
    assert [choice.index for choice in by_text] == [0, 1]
    assert complete(client, tokens, **settings).choices == by_text
    (one,) = complete(client, texts[1], **settings).choices
    assert one.model_copy(update={"index": 1}) == by_text[1]
    assert complete(client, tokens[1], **settings).choices == [one]
    assert [list(top) for top in one.logprobs.top_logprobs[1:]] == [[t] for t in one.logprobs.tokens[1:]]
    twice = complete(client, texts, n=2, **settings).choices
    assert [choice.text for choice in twice] == [by_text[0].text] * 2 + [by_text[1].text] * 2


def test_prompts_of_one_request_share_passes(server: Running) -> None:
    before = server.figures()["edgespec_cached_prompt_tokens_total"]
    prompts = ["Tea was first drunk in the south-west of China, where it grows. " * 3 + end for end in "abcd"]
    status, answer = server.post(TEXT, {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 0
    cached = server.figures()["edgespec_cached_prompt_tokens_total"] - before
    assert cached > answer["usage"]["prompt_tokens"] / 2


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("n_tokens", [0, 4])
def test_streams_begin_with_the_prompt(client: openai.OpenAI, logprobs: int | None, n_tokens: int) -> None:
    settings: dict[str, Any] = {"max_tokens": n_tokens, "echo": True, "logprobs": logprobs, "n": 2}
    whole = complete(client, [PROMPT, "Tea"], **settings)
    texts, found = [""] * 4, [dict[str, list[Any]]() for _ in range(4)]
    for chunk in complete(client, [PROMPT, "Tea"], stream=True, **settings):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            found[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    if logprobs is not None:
        assert found == [choice.logprobs.model_dump() for choice in whole.choices]
    else:
        assert texts[0].startswith(PROMPT)
        assert all(choice.logprobs is None for choice in whole.choices)


def test_published_requests(server: Running) -> None:
    status, several = server.post(
        TEXT, {"model": "m", "prompt": ["Tea is", "Coffee is"], "max_tokens": 4, "logprobs": 0}
    )
    assert status == 200
    assert [len(choice["logprobs"]["tokens"]) for choice in several["choices"]] == [4, 4]
    body = {"model": "m", "prompt": "Tea is hot", "max_tokens": 1, "echo": True, "logprobs": 1}
    status, echoed = server.post(TEXT, body)
    assert status == 200
    assert "warnings" not in echoed or all("echo" not in text for text in echoed["warnings"])
    assert echoed["choices"][0]["text"].startswith("Tea is hot")
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert "without" not in json.dumps(echoed)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (TEXT, {"prompt": "a", "suffix": "b", "echo": True}, "suffix cannot be echoed"),
        (TEXT, {"prompt": "a", "echo": 1}, "echo must be true or false"),
        ("/tokenize", {}, 'Missing "content", "prompt" or "messages".'),
        ("/tokenize", [], "not a JSON object"),
        ("/detokenize", {"tokens": "a"}, "tokens must be a list"),
        ("/detokenize", {"tokens": [10**9]}, "no token"),
    ],
)
def test_wrong_requests(server: Running, path: str, body: object, message: str) -> None:
    status, answer = server.post(path, body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_tokens_in_both_forms(server: Running, engine: Engine) -> None:
    tokens = engine.encoder.encode(PROMPT, raw=True)
    for body in (
        {"content": PROMPT},
        {"content": PROMPT, "add_special": False},
        {"prompt": PROMPT, "add_special_tokens": False},
        {"prompt": PROMPT, "model": "model"},
    ):
        status, answer = server.post("/tokenize", body)
        assert (status, answer["tokens"], answer["count"]) == (200, tokens, len(tokens))
        assert answer["max_model_len"] == 512
    assert "".join(server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})[1]["token_strs"])
    pieces = server.post("/tokenize", {"content": PROMPT, "with_pieces": True})[1]["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    assert "".join(piece["piece"] for piece in pieces) == PROMPT
    assert server.post("/detokenize", {"tokens": tokens})[1] == {"content": PROMPT, "prompt": PROMPT}
    status, info = server.get("/tokenizer_info")
    assert status == 200
    (end,) = server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})[1]["tokens"]
    assert engine.target.model.vocabulary.is_end(end)
    asked = [{"role": "user", "content": "Tea?"}]
    assert server.post("/tokenize", {"messages": asked})[1]["tokens"] == engine.encoder.encode(asked)
