"""Requests of the API, read: thinking, tools, messages with calls, and fields that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.api import responses
from edgespec.api.completion_request import ChatBody, CompletionRequest, read_request, translated, with_system
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal
from edgespec.api.response_store import ResponseStore
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.serving.anthropic import translation as anthropic
from edgespec.serving.ollama import translation as ollama

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "strict": True}}


def read(defaults: GenerationConfig | None = None, **body: Any) -> CompletionRequest:
    asked = translated({"messages": HI, **body}, chat=True)
    return read_request(asked, defaults or GenerationConfig(), model="m", aliases=("n",))


def read_response(body: object) -> CompletionRequest:
    asked = responses.as_chat(body, Warnings(), ResponseStore())
    return read_request(asked, GenerationConfig(), model="m")


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


_SAMPLERS: dict[str, Any] = {
    "dry_multiplier": 0.8,
    "dry_base": 2,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", "."],
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "banned_strings": ["a testament to", ""],
    "seed": 2**64 - 1,
}


@pytest.mark.parametrize("nsigma", ["top_n_sigma", "nsigma"])
def test_samplers_have_the_same_names_in_all_apis(nsigma: str) -> None:
    settings = {**_SAMPLERS, nsigma: 1.5, "max_tokens": -1}
    asked = [
        translated({"messages": HI, **settings}, chat=True),
        responses.as_chat({"input": "Hi", **_SAMPLERS, nsigma: 1.5}, Warnings(), ResponseStore()),
        anthropic.as_chat({"messages": HI, **settings}, Warnings()),
        ollama.chat_as_chat({"messages": HI, "options": settings}, Warnings()),
    ]
    expected = GenerationConfig(
        max_tokens=5,
        dry_multiplier=0.8,
        dry_base=2,
        dry_allowed_length=3,
        dry_sequence_breakers=("\n", "."),
        xtc_probability=0.5,
        xtc_threshold=0.2,
        top_n_sigma=1.5,
        banned_strings=("a testament to",),
        seed=2**64 - 1,
    )
    for one in asked:
        assert one is not None
        request = read_request(one, GenerationConfig(max_tokens=5), model="m")
        assert request.config == expected
        assert request.warnings == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"banned_strings": "x" * 16385}, "banned_strings has too many strings"),
        ({"banned_tokens": ["x"] * 1025}, "banned_strings has too many strings"),
        ({"dry_sequence_breakers": [5]}, r"dry_sequence_breakers\[0\] must be a string, not 5"),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers has too many strings"),
        ({"dry_allowed_length": 0}, "dry_allowed_length must be 1 or more, not 0"),
        ({"xtc_probability": "a"}, "xtc_probability must be a number"),
        ({"nsigma": 1000}, "top_n_sigma must be from -1 to 100"),
        ({"max_tokens": "many"}, "max_tokens must be an integer, not 'many'."),
        ({"seed": 2**64}, "seed must be from 0 to 18446744073709551615, not 18446744073709551616."),
        ({"messages": [{"role": ["user"]}]}, r"messages\[0\].role must be one of .*, not a list."),
        ({"messages": [{"content": "Hi"}]}, r'Missing "messages\[0\].role".'),
    ],
)
def test_wrong_fields_are_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(**body)


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"structural_tag": "{}"}},
        {"guided_json": {}, "guided_whitespace_pattern": " "},
        {"response_format": {"type": "structural_tag"}},
        {"min_tokens": 3, "response_format": {"type": "json_object"}},
        {"ignore_eos": True, "tools": [TOOL]},
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"guided_choice": []},
        {"structured_outputs": {"regex": ""}},
        {"messages": [*HI, {"role": "assistant", "content": "A"}], "guided_regex": "a"},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_form_that_cannot_be_enforced_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read(**body)


def test_ends_of_answers_have_the_names_of_other_servers() -> None:
    config = read(n_predict=3, min_tokens=2, stop_token_ids=[7, 8]).config
    assert (config.max_tokens, config.min_tokens, config.stop_tokens) == (3, 2, (7, 8))


def test_null_is_not_given() -> None:
    fields = (*ChatBody.__struct_fields__, *ChatBody.unsupported, "unheard_of")
    nothing = {name: None for name in fields if name != "messages"}
    assert read(**nothing) == read()


def test_there_may_be_many_tools_with_long_names() -> None:
    tools = [{"type": "function", "function": {"name": f"{n:0128}"}} for n in range(200)]
    request, asked = read(tools=tools), translated({"messages": HI, "tools": tools}, chat=True)
    assert len(request.config.tools) == 200
    assert request.warnings == ()
    with pytest.raises(UsageError, match=r"The tools have \d,\d* characters"):
        read_request(asked, GenerationConfig(), model="m", limits=Limits(tools=99))


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


def test_results_have_the_names_of_the_calls_before_them() -> None:
    def turn(*names: str) -> list[dict[str, Any]]:
        """As of a client that uses the same ids again."""
        calls = [{"id": f"call_{n}", "function": {"name": name}} for n, name in enumerate(names)]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
        return [{"role": "assistant", "tool_calls": calls}, *results]

    old = {"role": "assistant", "function_call": {"name": "old"}}
    told = [*HI, old, {"role": "function", "name": "old"}, *turn("f", "g"), *turn("h")]
    names = [message.get("name") for message in read(messages=told).prompt]
    assert names == [None, None, "old", None, "f", "g", None, "h"]


def test_log_probabilities() -> None:
    assert read().config.logprobs is None
    assert read(logprobs=True).config.logprobs == 0
    assert read(logprobs=True, top_logprobs=5).config.logprobs == 5
    text = translated({"prompt": "Hi", "logprobs": 3}, chat=False)
    assert read_request(text, GenerationConfig(), model="m").config.logprobs == 3


def test_names_and_fields() -> None:
    assert read(model="n").model == "n"
    assert read().model == ""
    assert read(model="n:latest").model == "n:latest"
    other = read(model="o")
    assert (other.model, other.warnings) == ("", ("The model 'o' is not served here; 'm' answers.",))
    assert read(user="me", store=True).warnings == ()
    assert len(read(**{f"x{n}": 1 for n in range(99)}).warnings) == 8
    assert "Did you mean 'repeat_penalty'?" in read(repeat_penalti=1).warnings[0]
    with pytest.raises(UsageError, match="Did you mean 'repeat_penalty'"):
        translated({"messages": HI, "repeat_penalti": 1}, chat=True, strict=True)


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
    request = read_response(asked)
    assert request.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert (request.config.max_tokens, request.config.think) == (9, "low")
    assert request.config.grammar is not None
    assert request.warnings == ("Ignored unknown field 'something'.",)


def test_calls_of_functions_are_part_of_the_answer_before_them() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    called = {"type": "function_call", "id": "fc_1", "status": "completed", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    told = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        thought,
        {**called, "call_id": "a"},
        {**called, "call_id": "b", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
    ]
    asked = {"input": told, "tools": [tool], "parallel_tool_calls": False, "store": False}
    asked["include"] = ["reasoning.encrypted_content"]

    def read_with(**more: Any) -> CompletionRequest:
        return read_response(asked | more)

    request = read_with(tool_choice={"type": "function", "name": "f"})
    assert [message["role"] for message in request.prompt] == ["user", "assistant", "tool", "tool"]  # type: ignore[index,call-overload]
    answer: Any = request.prompt[1]
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm")
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{}, {"x": 1}]
    assert [message["content"] for message in request.prompt[2:]] == ["1", "2"]  # type: ignore[index,call-overload]
    assert [tool.name for tool in request.config.tools] == ["f"]
    assert (request.config.tool_choice, request.config.parallel_tool_calls) == ("f", False)
    assert request.warnings == ()
    assert read_with().config.tool_choice == "auto"
    others = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [tool]}]
    request = read_with(tools=[tool, *others])
    assert [tool.name for tool in request.config.tools] == ["f"], "agents send all tools that they know"
    assert len(request.warnings) == len(others)
    for kind, said in zip(("web_search", "namespace"), request.warnings, strict=True):
        assert kind in said
    assert not read_with(tool_choice="none").config.offers_tools
    for wrong_body, message in (
        ({"tools": {"f": 1}}, "tools"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "'g', which is not one of the tools"),
        ({"input": []}, "non-empty"),
        ({"input": [{**called, "call_id": "a", "name": 1}]}, r"input\[0\].name must be a string, not 1"),
        ({"tools": [{"type": ["x"]}]}, r"tools\[0\].type must be a string, not a list"),
    ):
        with pytest.raises(UsageError, match=message):
            read_with(**wrong_body)


def test_a_system_prompt_is_for_chats_that_have_none() -> None:
    ours = {"role": "system", "content": "Ahoy."}
    assert with_system(read(), "Ahoy.").prompt == [ours, *HI]
    assert with_system(read(), None).prompt == HI
    own = read(messages=[{"role": "developer", "content": "Be brief."}, *HI])
    assert with_system(own, "Ahoy.") == own


def test_a_conversation_that_is_full_is_read_but_not_continued() -> None:
    conversations = ResponseStore().conversations
    text = {"id": "item_1", "type": "message", "content": "x" * (17 << 20)}
    identifier = conversations.create([text], {})["id"]
    assert conversations.items(identifier) == [text]
    with pytest.raises(Refusal, match="16 MiB"):
        conversations.items(identifier, to_continue=True)
    with pytest.raises(Refusal, match="16 MiB"):
        conversations.add(identifier, [])
    conversations.remove_item(identifier, "item_1")
    conversations.add(identifier, [{"id": "item_2"}])
    assert conversations.items(identifier, to_continue=True) == [{"id": "item_2"}]
