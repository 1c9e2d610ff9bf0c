"""Requests of the API, read: thinking, tools, messages with calls, and fields that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.serving.refusals import Refusal
from edgespec.serving.requests import Request, read_request
from edgespec.serving.responses import as_chat

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "strict": True}}


def read(defaults: GenerationConfig | None = None, **body: Any) -> Request:
    asked = {"messages": HI, **body}
    return read_request(asked, defaults or GenerationConfig(), chat=True, model="m", aliases=("n",))


@pytest.mark.parametrize(
    ("body", "think"),
    [
        ({}, "high"),
        ({"think": None}, "high"),
        ({"think": False}, "off"),
        ({"think": 30}, "30"),
        ({"think": "budget 30"}, "budget 30"),
        ({"reasoning_effort": "none"}, "off"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "medium"}, "medium"),
        ({"chat_template_kwargs": {}}, "high"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, "off"),
        ({"chat_template_kwargs": {"thinking": True}}, "on"),
        ({"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}}, "low"),
        ({"chat_template_kwargs": {"thinking_budget": 0}}, "0"),
    ],
)
def test_how_much_to_think(body: dict[str, Any], think: str) -> None:
    assert read(GenerationConfig(think="high"), **body).config.think == think


def test_tools_and_the_choice_among_them() -> None:
    config = read(tools=[TOOL]).config
    assert ([tool.name for tool in config.tools], config.tool_choice) == (["f"], "auto")
    assert config.parallel_tool_calls
    named = read(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}).config
    assert named.tool_choice == "f"
    assert not read(tools=[TOOL], parallel_tool_calls=False).config.parallel_tool_calls
    assert read(tools=[], tool_choice="none").config == read().config


def test_calls_and_results_in_messages() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    told = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "2"}]},
    ]
    function = {"name": "f", "arguments": {"x": 1}}
    assert read(messages=told).prompt == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
            "reasoning_content": "Hm",
        },
        {"role": "tool", "content": "2", "tool_call_id": "a", "name": "f"},
    ]


def test_log_probabilities() -> None:
    assert read().config.logprobs is None
    assert read(logprobs=True).config.logprobs == 0
    assert read(logprobs=True, top_logprobs=5).config.logprobs == 5
    text = read_request({"prompt": "Hi", "logprobs": 3}, GenerationConfig(), chat=False, model="m")
    assert text.config.logprobs == 3


def test_names_and_fields() -> None:
    assert read(model="n").model == "n"
    assert read().model == ""
    with pytest.raises(Refusal, match="does not exist here"):
        read(model="o")
    assert read(user="me", store=True).warnings == ()
    assert len(read(**{f"x{n}": 1 for n in range(99)}).warnings) == 8
    with pytest.raises(UsageError, match="Did you mean 'repeat_penalty'"):
        read(repeat_penalti=1)


def test_a_response_is_asked_for_as_a_chat_is() -> None:
    asked = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        ],
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}},
        "something": 1,
    }
    request = read_request(as_chat(asked), GenerationConfig(), chat=True, model="m")
    assert request.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert (request.config.max_tokens, request.config.think) == (9, "low")
    assert request.config.grammar is not None
    assert request.warnings == ("The field 'something' is not known here, and was ignored.",)
