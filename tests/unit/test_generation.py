"""Generation settings, and the records of results."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

from edgespec.errors import UsageError
from edgespec.generation.config import MAX_SEED, GenerationConfig, Grammar
from edgespec.generation.result import Generation, MemoryUse, PassRecord, Timings
from edgespec.generation.thinking import ThinkingRequest
from edgespec.generation.tools import ToolCall

THINK = "think must be auto, on, off, low, medium, high or a maximum number of tokens, not"


@pytest.mark.parametrize(
    ("text", "think"),
    [
        ("auto", ThinkingRequest()),
        ("ON", ThinkingRequest(enabled=True)),
        ("off", ThinkingRequest(enabled=False)),
        ("high", ThinkingRequest(enabled=True, effort="high")),
        ("500", ThinkingRequest(enabled=True, budget=500)),
        ("budget 0", ThinkingRequest(enabled=True, budget=0)),
        ("budget=7", ThinkingRequest(enabled=True, budget=7)),
        (False, ThinkingRequest(enabled=False)),
        (12, ThinkingRequest(enabled=True, budget=12)),
    ],
)
def test_how_much_a_model_thinks(text: Any, think: ThinkingRequest) -> None:
    assert GenerationConfig(think=text).thinking == think


def test_tools_are_given_as_the_api_has_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    inner = {"name": "f", "description": "Does it.", "parameters": schema}
    config = GenerationConfig(tools=[{"type": "function", "function": inner}, {"name": "g"}])  # type: ignore[arg-type]
    assert [tool.name for tool in config.tools] == ["f", "g"]
    assert config.tools[0].definition == {"type": "function", "function": inner}
    assert config.with_(seed=3).tools == config.tools
    assert config.offers_tools
    assert not config.with_(tool_choice="none").offers_tools
    assert config.with_(grammar=Grammar("regex", "a")).offers_tools


def test_thoughts_and_calls_are_in_the_record() -> None:
    answer = Generation(reasoning="Hm", reasoning_tokens=3, tool_calls=[ToolCall("a", "f", "{}")])
    record = answer.to_json("Hi")
    assert record["reasoning_content"] == "Hm"
    assert record["usage"]["reasoning_tokens"] == 3
    assert record["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert {"reasoning_content", "tool_calls"} & set(Generation().to_json("Hi")) == set()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", -5, "max_tokens must be 0 or more, not -5."),
        ("temperature", -0.1, "temperature must be from 0 to 100, not -0.1."),
        ("temperature", 101, "temperature must be from 0 to 100, not 101."),
        ("temperature", math.nan, "temperature must be from 0 to 100, not nan."),
        ("temperature", math.inf, "temperature must be from 0 to 100, not inf."),
        ("top_k", -1, "top_k must be 0 (all tokens) or more, not -1."),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, not 0."),
        ("top_p", 1.01, "top_p must be above 0 and at most 1, not 1.01."),
        ("top_p", math.nan, "top_p must be above 0 and at most 1, not nan."),
        ("min_p", -0.1, "min_p must be from 0 to 1, not -0.1."),
        ("min_p", 2, "min_p must be from 0 to 1, not 2."),
        ("repeat_penalty", 0, "repeat_penalty must be from 0.01 to 100, not 0."),
        ("repeat_penalty", math.inf, "repeat_penalty must be from 0.01 to 100, not inf."),
        ("frequency_penalty", 200, "frequency_penalty must be from -100 to 100, not 200."),
        ("presence_penalty", -200, "presence_penalty must be from -100 to 100, not -200."),
        ("penalty_window", -1, "penalty_window must be 0 (everything) or more, not -1."),
        ("seed", -1, f"seed must be from 0 to {MAX_SEED}, not -1."),
        ("seed", 2**64, f"seed must be from 0 to {MAX_SEED}, not {2**64}."),
        ("top_k", 2.5, "top_k must be an integer, not 2.5."),
        ("max_tokens", 8.0, "max_tokens must be an integer, not 8.0."),
        ("penalty_window", 1.5, "penalty_window must be an integer, not 1.5."),
        ("seed", 1.0, "seed must be an integer, not 1.0."),
        ("stop", ("a", ""), "stop must be a non-empty string, not ''."),
        ("stop", "END", "stop must be a list of strings, not 'END'."),
        ("logprobs", 21, "logprobs must be an integer from 0 to 20, not 21."),
        ("logprobs", True, "logprobs must be an integer, not True."),
        ("think", "budget -1", f"{THINK} 'budget -1'."),
        ("think", "9999999", f"{THINK} '9999999'."),
        (
            "think",
            1.5,
            "think must be true, false, a number of tokens, or a string such as 'off', not 1.5.",
        ),
        ("tools", "f", "tools must be a list of tools, not 'f'."),
        ("tools", ["f"], 'A tool is not a function. Write {"type": "function", "function": {...}}.'),
        (
            "tools",
            [{"name": "a b"}],
            "A tool has no valid name. It must have 1 to 256 letters, digits, '_', '-' and '.'.",
        ),
        (
            "tools",
            [{"name": "f", "parameters": {"type": "array"}}],
            "The parameters of the tool f are not the JSON schema of an object.",
        ),
        ("tools", [{"name": "f"}] * 2, "Two tools are named f. Give each a name of its own."),
        (
            "tool_choice",
            "required",
            "tool_choice is 'required', and there are no tools. Give tools, or leave out tool_choice.",
        ),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as direct:
        GenerationConfig(**{name: value})
    assert str(direct.value) == message
    with pytest.raises(UsageError) as changed:
        GenerationConfig().with_(**{name: value})
    assert str(changed.value) == message
    assert direct.value.exit_code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1},
        {"temperature": 100, "top_p": 1, "min_p": 1, "repeat_penalty": 0.01},
        {"frequency_penalty": -100, "presence_penalty": 100, "penalty_window": 0},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"stop": ("END", "\n")},
    ],
)
def test_values_at_the_ends_of_their_ranges_are_fine(values: dict[str, Any]) -> None:
    config = GenerationConfig().with_(**values)
    assert {name: getattr(config, name) for name in values} == values


def test_greedy_is_temperature_zero() -> None:
    assert GenerationConfig().greedy
    assert not GenerationConfig(temperature=1e-6).greedy


def test_with_changes_a_copy() -> None:
    config = GenerationConfig(top_k=3)
    assert config.with_(temperature=0.5) == GenerationConfig(top_k=3, temperature=0.5)
    assert config == GenerationConfig(top_k=3)


def test_unknown_settings_are_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as raised:
        GenerationConfig().with_(temprature=1)
    assert raised.value.what == "There is no setting 'temprature'."
    assert raised.value.hint == (
        f"The settings are {', '.join(sorted(f.name for f in fields(GenerationConfig)))}."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'."),
        ({"max_tokens": "5"}, "max_tokens must be an integer, not '5'."),
        ({"stop": 3}, "stop must be a list of strings, not 3."),
    ],
)
def test_values_of_the_wrong_kind_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        GenerationConfig().with_(**changes)
    assert str(raised.value) == message


def _generation() -> Generation:
    return Generation(
        text="Hi é",
        tokens=[4, 5, 6, 7, 8],
        finish_reason="length",
        prompt_tokens=3,
        exact=True,
        seed=12,
        passes=[PassRecord(1, 0, 0.0, 0.5, 0.25), PassRecord(9, 3, 0.5, 1.0, 0.25, wait_s=0.5)],
        timings=Timings(1.00006, 2, 2.5, 0.5, 1.5, 0.5),
        memory=MemoryUse(10, 20, 30, 40),
    )


def test_the_json_record_has_the_promised_names_and_values() -> None:
    record = _generation().to_json("Say hi", "a-1")
    assert record == {
        "id": "a-1",
        "prompt": "Say hi",
        "text": "Hi é",
        "tokens": [4, 5, 6, 7, 8],
        "finish_reason": "length",
        "error": None,
        "seed": 12,
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
        "timings": {
            "load_s": 1.0001,
            "prefill_s": 2,
            "decode_s": 2.5,
            "draft_s": 0.5,
            "verify_s": 1.5,
            "io_wait_s": 0.5,
            "tokens_per_second": 1.6,
        },
        "speculation": {
            "passes": 2,
            "tokens_per_pass": 2.5,
            "nodes_per_pass": 5.0,
            "acceptance_rate": 0.375,
            "exact": True,
            "verify": "auto",
            "lossy": False,
        },
        "memory": {
            "budget_bytes": 10,
            "peak_rss_bytes": 20,
            "resident_bytes": 30,
            "streamed_bytes_per_pass": 40,
            "device_bytes": 0,
            "layers": None,
        },
        "experts": None,
    }
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_an_answer_without_tokens_has_a_record_without_nonsense() -> None:
    record = Generation(finish_reason="cancelled").to_json([{"role": "user", "content": "x"}])
    assert record["id"] is None
    assert record["timings"]["tokens_per_second"] == 0
    assert record["speculation"] == {
        "passes": 0,
        "tokens_per_pass": 0,
        "nodes_per_pass": 0,
        "acceptance_rate": None,
        "exact": False,
        "verify": "auto",
        "lossy": False,
    }
    json.dumps(record, allow_nan=False)


def test_plain_decoding_drafted_nothing() -> None:
    plain = Generation(tokens=[1, 2], passes=[PassRecord(1, 0, 0, 1, 0)] * 2, timings=Timings(decode_s=2))
    assert plain.acceptance_rate == 0
    assert plain.tokens_per_pass == plain.nodes_per_pass == 1
    assert plain.tokens_per_second == 0.5


@pytest.mark.parametrize(
    ("tokens", "accepted"), [(9, 6), (7, 6), (6, 5), (2, 1), (1, 0)], ids="kept {}".format
)
def test_a_pass_counts_no_more_than_became_part_of_the_answer(tokens: int, accepted: int) -> None:
    record = PassRecord(9, 6, 0.5, 1.0, 0.25)
    cut = record.cut(tokens)
    assert cut.accepted == accepted
    assert (cut.nodes, cut.seconds) == (record.nodes, record.seconds)


def test_a_round_is_drafting_reading_and_accepting() -> None:
    assert PassRecord(9, 3, 0.5, 1.0, 0.25, wait_s=0.75).seconds == 1.75
