"""The Ollama API over HTTP, with the real Ollama client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.integration.test_serve_api import thinking
from tests.integration.test_thinking import WEATHER
from tests.serving import TEXT, Running, serving

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
BRIEF: Any = {"options": {"num_predict": 12}, "think": False}


@pytest.fixture(scope="module")
def server(smol_path: Path) -> Iterator[Running]:
    with serving(lambda: thinking(smol_path), aliases=("small", "small-*")) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    with server.ollama() as client:
        yield client


def chat(client: ollama.Client, messages: Any = SKY, **more: Any) -> Any:
    return client.chat(**{"model": "model", "messages": messages, **BRIEF, **more})


def test_a_chat_is_the_same_whole_and_streamed(client: ollama.Client) -> None:
    whole = chat(client)
    assert whole.message.content
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12)
    assert whole.prompt_eval_count > 5
    assert whole.eval_duration > 0
    lines = list(chat(client, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == 12


def test_generate_uses_the_template_unless_it_is_raw(client: ollama.Client, server: Running) -> None:
    system: Any = {"prompt": "Why is the sky blue?", "system": "You are a sailor."}
    templated = client.generate("model", **system, **BRIEF)
    told = [{"role": "system", "content": system["system"]}, *SKY]
    assert templated.response == chat(client, told).message.content
    raw = client.generate("model", "Once upon a time", raw=True, options={"num_predict": 8})
    assert raw.response == server.text()
    lines = list(client.generate("model", **system, **BRIEF, stream=True))
    assert "".join(line.response for line in lines) == templated.response


def test_thoughts_are_apart(client: ollama.Client) -> None:
    more: Any = {"think": True, "options": {"num_predict": 30}}
    lines = list(chat(client, stream=True, **more))
    thought = "".join(line.message.thinking or "" for line in lines)
    whole = chat(client, **more).message
    assert thought == whole.thinking != ""
    assert "".join(line.message.content for line in lines) == whole.content


def test_tools_are_called_and_their_results_taken(client: ollama.Client) -> None:
    more: Any = {"tools": [WEATHER], "options": {"num_predict": 40}}
    assert chat(client, **more).message is not None
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}}}
    told = [
        *SKY,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "Snow"},
    ]
    after = chat(client, told, **more)
    assert after.prompt_eval_count > chat(client, **more).prompt_eval_count


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {}, "maxProperties": 0}])
def test_formats_are_followed(client: ollama.Client, form: Any) -> None:
    answer = chat(client, format=form, options={"num_predict": 60})
    if answer.done_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    else:
        assert answer.message.content.lstrip().startswith("{")


def test_options_change_the_answer(client: ollama.Client) -> None:
    said = chat(client).message.content
    stop = said.split()[2]
    assert stop not in chat(client, options={"num_predict": 12, "stop": [stop]}).message.content
    hot: Any = {"num_predict": 12, "temperature": 1.5, "seed": 7, "num_ctx": 512, "num_gpu": 3}
    first, second = (chat(client, options=hot).message.content for _ in range(2))
    assert first == second


def test_a_request_without_a_prompt_finds_the_model_loaded(client: ollama.Client) -> None:
    assert chat(client, []).done_reason == "load"
    assert client.generate("model", "").done_reason == "load"


def test_the_model_is_listed_and_shown(client: ollama.Client, smol_path: Path) -> None:
    listed = client.list().models
    assert [model.model for model in listed] == ["model", "small"]
    assert listed[0].size == smol_path.stat().st_size
    assert listed[0].details is not None
    assert listed[0].details.family == "llama"
    assert listed[0].details.quantization_level == "Q4_1"
    shown = client.show("small:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 1024
    assert {"completion", "tools", "thinking"} == set(shown.capabilities or [])
    (running,) = client.ps().models
    assert running.name == "model"


def test_the_version_is_one_that_clients_accept(server: Running) -> None:
    status, body = server.get("/api/version")
    assert status == 200
    assert tuple(map(int, body["version"].split("."))) >= (0, 6, 4)
    assert "edgespec" in body["server"]


def test_names_may_have_the_default_tag(client: ollama.Client) -> None:
    assert chat(client, model="small-1:latest", options={"num_predict": 1}).done
    assert chat(client, model="other", options={"num_predict": 1}).model == "model"


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/api/chat", {"messages": 7}, 400, "messages"),
        ("/api/chat", {"messages": SKY, "options": 7}, 400, "options"),
        ("/api/chat", {"messages": SKY, "format": 7}, 400, "format"),
        ("/api/embed", {"input": "x"}, 404, "makes no embeddings"),
        ("/api/pull", {"model": "x"}, 501, "does not manage models"),
        ("/api/chat", {"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "1024"),
    ],
)
def test_errors_have_the_form_of_the_api(
    server: Running, path: str, body: dict[str, Any], status: int, told: str
) -> None:
    given, answer = server.post(path, body)
    assert (given, list(answer)) == (status, ["error"])
    assert told in answer["error"]


def test_an_error_in_a_stream_reaches_the_client(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="context"):
        list(chat(client, [{"role": "user", "content": "word " * 2000}], stream=True))


def test_the_openai_api_is_served_beside_it(server: Running) -> None:
    assert server.post(TEXT, {"prompt": "Once", "max_tokens": 1})[0] == 200
