"""Thoughts, tool calls, log-probabilities and responses over HTTP, with the real OpenAI client."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from edgespec.engine.engine import Engine
from edgespec.serving.request_log import RequestLogEntry, request_logger
from tests.integration.test_thinking import ASKED, WEATHER
from tests.serving import CHAT, TEXT, Running, load, serving
from tests.templated import now_speaking
from tests.unit import templates
from tests.waiting import wait_until

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
# Thinks when it is not told otherwise, and calls tools as Hermes does.
TEMPLATE = templates.QWEN.replace(
    "{{- '<|im_start|>assistant\\n' }}\n{%- if enable_thinking is defined and not enable_thinking %}",
    "{{- '<|im_start|>assistant\\n' }}\n{%- if not enable_thinking is defined or enable_thinking %}"
    "{{- '<think>\\n' }}{%- else %}",
)
LOG: list[RequestLogEntry] = []
SYSTEM = "You are a sailor."


def thinking(path: Path) -> Engine:
    return now_speaking(load(path, 1024), TEMPLATE)


@pytest.fixture(scope="module")
def server(smol_path: Path) -> Iterator[Running]:
    settings: dict[str, Any] = {"aliases": ("gpt-4o", "small"), "on_request": LOG.append, "system": SYSTEM}
    with serving(lambda: thinking(smol_path), **settings) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def ask(client: openai.OpenAI, messages: Any = SKY, **more: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(model="model", messages=messages, **more)


def test_a_system_prompt_of_the_server_is_for_chats_without_one(client: openai.OpenAI) -> None:
    plain, own, other = (
        ask(client, [*({"role": "system", "content": text} for text in texts), *SKY], max_tokens=1)
        for texts in ((), (SYSTEM,), ("You are a sailor, and you are brief.",))
    )
    assert plain.usage.prompt_tokens == own.usage.prompt_tokens < other.usage.prompt_tokens


def test_thoughts_are_apart_from_answers(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"max_tokens": 30, "extra_body": {"think": 10}}
    whole = ask(client, **settings)
    message = whole.choices[0].message
    assert message.reasoning_content
    assert message.content
    assert 10 <= whole.usage.completion_tokens_details.reasoning_tokens < 20
    chunks = list(ask(client, stream=True, **settings))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    for off in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        answer = ask(client, max_tokens=8, **off)
        assert not hasattr(answer.choices[0].message, "reasoning_content")
        assert answer.usage.completion_tokens_details is None


def test_a_tool_is_called_and_its_result_taken(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "extra_body": {"think": False},
        "max_tokens": 60,
    }
    answer = ask(client, ASKED, **settings)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}

    streamed: dict[int, dict[str, str]] = {}
    chunks = list(ask(client, ASKED, stream=True, **settings))
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            known = streamed.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
            known["id"] += piece.id or ""
            known["name"] += piece.function.name or ""
            known["arguments"] += piece.function.arguments or ""
    assert streamed == {0: {"id": call.id, "name": "get_weather", "arguments": call.function.arguments}}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 2

    result = {"role": "tool", "tool_call_id": call.id, "content": "Snow, -3 degrees"}
    told = [*ASKED, choice.message.model_dump(exclude_none=True), result]
    after = ask(client, told, tools=[WEATHER], max_tokens=8, extra_body={"think": False})
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens + 20


def test_tools_may_be_left_alone(client: openai.OpenAI) -> None:
    free = ask(client, max_tokens=12, tools=[WEATHER], extra_body={"think": False})
    assert free.choices[0].finish_reason in ("length", "stop", "tool_calls")
    none = ask(client, max_tokens=12, tools=[WEATHER], tool_choice="none", extra_body={"think": False})
    assert none.choices[0].finish_reason in ("length", "stop")
    assert none.choices[0].message.tool_calls is None
    # The prompt is the same, so that nothing of it is read again.
    assert none.usage.prompt_tokens == free.usage.prompt_tokens
    assert none.usage.prompt_tokens_details.cached_tokens == none.usage.prompt_tokens - 1


def test_log_probabilities(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"think": False},
    }
    whole = ask(client, **settings).choices[0]
    found = whole.logprobs.content
    assert "".join(item.token for item in found).strip() == whole.message.content.strip()
    assert len(found) == 6
    for item in found:
        assert bytes(item.bytes).decode() == item.token
        assert (item.top_logprobs[0].token, len(item.top_logprobs)) == (item.token, 2)
        assert sum(math.exp(other.logprob) for other in item.top_logprobs) <= 1
    streamed = [
        item
        for chunk in ask(client, stream=True, **settings)
        for item in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == found
    assert ask(client, max_tokens=2).choices[0].logprobs is None

    text = client.completions.create(
        model="small", prompt="The capital of France is", max_tokens=3, logprobs=1
    )
    assert text.model == "small"
    logprobs: Any = text.choices[0].logprobs
    assert "".join(logprobs.tokens) == text.choices[0].text
    assert [list(top.values()) for top in logprobs.top_logprobs] == [[p] for p in logprobs.token_logprobs]
    assert logprobs.text_offset == [0, *(sum(map(len, logprobs.tokens[: n + 1])) for n in range(2))]


def test_names_times_and_warnings(client: openai.OpenAI, server: Running) -> None:
    assert [model.id for model in client.models.list()] == ["model", "gpt-4o", "small"]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    status, answer = server.post(
        TEXT, {"prompt": "Once", "max_tokens": 5, "model": "gpt-4o", "slot_color": 1}
    )
    assert (status, answer["model"]) == (200, "gpt-4o")
    assert answer["warnings"] == ["Ignored unknown field 'slot_color'."]
    times = answer["timings"]
    assert times["prompt_n"] + times["cache_n"] == answer["usage"]["prompt_tokens"]
    assert times["cache_n"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert times["predicted_n"] == 5
    assert times["predicted_per_second"] == pytest.approx(4e3 / times["predicted_ms"], rel=1e-2)
    assert times["draft_n_accepted"] <= times["draft_n"]
    last = list(ask(client, max_tokens=3, stream=True))[-1]
    assert last.timings["predicted_n"] == 3


def test_requests_are_logged(client: openai.OpenAI, server: Running, tmp_path: Path) -> None:
    list(ask(client, max_tokens=7, stream=True))
    body = b'{"messages": []}'
    head = f"POST {CHAT} HTTP/1.1\r\nHost: [\r\nContent-Type: application/json\r\n"  # no host at all
    with server.connect() as strange:
        strange.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert strange.answer()[0] == 400

    def own() -> list[RequestLogEntry]:
        return [entry for entry in LOG if entry.completion_tokens == 7 or entry.status == 400]

    # An entry is made when the answer has been sent, so also those of earlier tests may still come.
    wait_until(lambda: len(own()) >= 2)
    first, second = own()
    assert (first.path, first.status, first.finish_reason) == (CHAT, 200, "length")
    assert first.streamed
    assert (second.status, second.finish_reason) == (400, "")
    assert str(first).startswith("/v1/chat/completions 200 in ")
    shown: list[str] = []
    log = request_logger(tmp_path / "log.jsonl", shown.append)
    log.info(first)
    log.info(second)
    log.handlers[-1].close()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 400]
    assert shown == [str(first), str(second)]


def test_responses(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "model", "max_output_tokens": 24, "extra_body": {"think": 8}}
    instructions = "Tell the longest story that you can."

    def in_chat(question: str) -> Any:
        messages: Any = [{"role": "system", "content": instructions}, {"role": "user", "content": question}]
        return ask(client, messages, max_tokens=24, extra_body={"think": 8})

    # One whose answer does not end by itself, which depends on the processor's rounding.
    questions = ("Why is the sky blue?", "Who lived in the forest?", "What did the fox say?", "And then?")
    question = next(text for text in questions if in_chat(text).choices[0].finish_reason == "length")
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": question}]}]
    whole = client.responses.create(input=asked, instructions=instructions, **settings)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens == 24
    assert whole.usage.output_tokens_details.reasoning_tokens >= 8
    assert in_chat(question).choices[0].message.content == whole.output_text

    with client.responses.stream(input=asked, instructions=instructions, **settings) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text == final.output_text
    assert [item.type for item in final.output] == ["reasoning", "message"]

    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    done = client.responses.create(
        model="model", input="One or two?", text=form, reasoning={"effort": "none"}
    )
    assert done.status == "completed"
    assert json.loads(done.output_text)["n"] in (1, 2)


def test_responses_call_functions(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}  # type: ignore[dict-item]
    named: Any = {"type": "function", "name": "get_weather"}
    settings: dict[str, Any] = {"model": "model", "tools": [tool], "tool_choice": named}
    settings |= {"max_output_tokens": 120, "extra_body": {"think": 5}}
    asked: Any = [*ASKED]
    whole = client.responses.create(input=asked, **settings)
    assert whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "function_call"]
    call: Any = whole.output[-1]
    assert (call.name, call.status) == ("get_weather", "completed")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    assert (whole.tool_choice.name, whole.tools[0].name) == ("get_weather", "get_weather")  # type: ignore[union-attr]

    with client.responses.stream(input=asked, **settings) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == call.arguments
    assert len(deltas) > 1
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments
    final = events[-1].response  # type: ignore[union-attr]
    assert (events[-1].type, final.status) == ("response.completed", "completed")
    streamed: Any = final.output[-1]
    assert (streamed.call_id, streamed.arguments) == (call.call_id, call.arguments)
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "function_call"]

    # The items go back as they came, with the result.
    told: Any = [*asked, *(item.to_dict() for item in whole.output)]
    told.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain"})
    answer = client.responses.create(
        model="model",
        input=told,
        tools=[tool],
        tool_choice="none",
        max_output_tokens=8,
        reasoning={"effort": "none"},
    )
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text
    assert answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
