"""Thoughts, thinking budgets and tool calls with a real model, whose chat template is replaced by another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request
from edgespec.engine.sessions.session import Session
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.generation.result import Generation
from tests.serving import load
from tests.templated import speaking
from tests.tiers import slow_except
from tests.unit import templates
from tests.unit.answering import Served

SKY = "Why is the sky blue?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def loaded(short_path: Path) -> Iterator[Engine]:
    with load(short_path, 1024) as engine:
        yield engine


def rendered(engine: Engine, prompt: Any = SKY, **settings: Any) -> str:
    tokens = engine.encoder.encode(prompt, config=GenerationConfig(**settings))
    return b"".join(engine.target.model.vocabulary.piece(t, control=True) for t in tokens).decode()


def test_a_thought_is_taken_from_the_answer_and_its_budget_kept(loaded: Engine) -> None:
    with speaking(loaded, templates.OPENED) as engine:
        chunks = list(engine.stream(SKY, GenerationConfig(max_tokens=40, think="12")))
        answer = chunks[-1].generation
        assert answer is not None
        assert answer.reasoning
        assert answer.text
        assert "think>" not in answer.reasoning + answer.text
        assert "".join(chunk.reasoning for chunk in chunks) == answer.reasoning
        assert "".join(chunk.text for chunk in chunks) == answer.text
        vocabulary = engine.target.model.vocabulary
        free = engine.generate(SKY, GenerationConfig(max_tokens=20, think="on"))
        assert free.reasoning.startswith(answer.reasoning)
        assert answer.tokens[:12] == free.tokens[:12]
        closed = b"".join(map(vocabulary.piece, answer.tokens[12:])).decode()
        assert closed.startswith("\n</think>\n\n")
        record = answer.to_json(SKY)
        assert record["reasoning_content"] == answer.reasoning
        assert 12 <= record["usage"]["reasoning_tokens"] < 20


def test_an_answer_is_continued_behind_the_thought_that_it_was_written_behind(loaded: Engine) -> None:
    with speaking(loaded, templates.QWEN) as engine:
        encoder, vocabulary = engine.encoder, engine.target.model.vocabulary
        asked = [{"role": "user", "content": SKY}]
        begun = [*asked, {"role": "assistant", "content": "It is"}]
        for think, text, ends in (
            (
                "on",
                "<think>\nHm.\n</think>\n\nIt is",
                {"on": "Hm.\n</think>\n\nIt is", "off": "\n\n</think>\n\nIt is"},
            ),
            ("off", "It is", {"on": "\n\n</think>\n\nIt is", "off": "\n\n</think>\n\nIt is"}),
        ):
            prompt = encoder.conversation(asked, config=GenerationConfig(think=think)).tokens
            tokens = vocabulary.tokenize(text, control=False)
            answer = Generation(text="It is", reasoning="Hm." if think == "on" else "", tokens=tokens)
            written = encoder.written(prompt, answer)
            assert written is not None
            for other, end in ends.items():
                config = GenerationConfig(think=other)
                found, own = encoder.continued(begun, config=config, written={1: written})
                spelled = b"".join(vocabulary.piece(t, control=True) for t in found).decode()
                assert spelled.endswith(end)
                assert spelled.count("<think>") == 1
                assert own == (written if other == think else None)


def test_thinking_is_switched_off_and_on(loaded: Engine) -> None:
    with speaking(loaded, templates.OPENED) as engine:
        assert rendered(engine).endswith("assistant\n<think>\n")
        assert rendered(engine, think="off").endswith("assistant\n<think>\n</think>\n\n")
        answer = engine.generate(SKY, GenerationConfig(max_tokens=8, think="off"))
        assert (answer.reasoning, answer.reasoning_tokens) == ("", 0)
        assert answer.text
    with speaking(loaded, templates.QWEN) as engine:
        assert rendered(engine, think="on") == rendered(engine)
        assert rendered(engine, think="off") == rendered(engine) + "<think>\n\n</think>\n\n"
    with speaking(loaded, templates.DEEPSEEK_HYBRID) as engine:
        assert rendered(engine, think="on").endswith("<think>")
        assert rendered(engine).endswith("</think>")
    with speaking(loaded, templates.HARMONY) as engine:
        assert "Reasoning: high" in rendered(engine, think="high")
        assert rendered(engine, think="off").endswith("assistant<|channel|>final<|message|>")
    with speaking(loaded, templates.GPT_OSS) as engine:
        assert rendered(engine, think="off").endswith("assistant<|channel|>final<|message|>")
        # With tools, the answer may still be a call.
        closed = "assistant<|channel|>analysis<|message|><|end|><|start|>assistant"
        assert rendered(engine, think="off", tools=(WEATHER,)).endswith(closed)
    before = rendered(loaded)
    assert before == rendered(loaded, think="off") == rendered(loaded, think="high")


def test_a_text_that_continues_is_not_taken_apart(loaded: Engine) -> None:
    with speaking(loaded, templates.OPENED) as engine:
        answer = engine.generate("<think>\n", GenerationConfig(max_tokens=6, think="2"), raw=True)
        assert (answer.reasoning, len(answer.tokens)) == ("", 6)


@pytest.mark.slow
def test_budgets_and_calls_are_the_same_with_every_drafter(
    loaded: Engine, short_path: Path, short_q4_path: Path
) -> None:
    tools: Any = {"tools": (WEATHER,), "tool_choice": "required"}
    configs = [
        GenerationConfig(max_tokens=26, think="9"),
        GenerationConfig(max_tokens=40, think="7", temperature=0.8, seed=5, logprobs=2, **tools),
    ]

    def answers(engine: Engine) -> list[Any]:
        with speaking(engine, templates.OPENED):
            found = [engine.generate(ASKED, config) for config in configs]
        return [(a.tokens, a.reasoning, a.text, a.tool_calls, a.finish_reason, a.logprobs) for a in found]

    plain = answers(loaded)
    with load(short_path, 1024, draft=short_q4_path, tree_budget=12) as engine:
        assert answers(engine) == plain
    with speaking(loaded, templates.OPENED) as engine:
        together = [
            event.chunk.generation
            for event in engine.stream_many(Request(ASKED, config, key=n) for n, config in enumerate(configs))
            if event.chunk is not None and event.chunk.generation is not None
        ]
    assert sorted(a.tokens for a in together) == sorted(tokens for tokens, *_ in plain)


def test_a_form_holds_after_the_thought(loaded: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    config = GenerationConfig(max_tokens=50, think="5", grammar=Grammar.of_schema(schema))
    for template in (templates.OPENED, templates.QWEN):
        with speaking(loaded, template) as engine:
            answer = engine.generate(SKY, config)
            assert json.loads(answer.text)["n"] in (1, 2)
            assert answer.reasoning or template is not templates.OPENED


# Marks that SmolLM2's vocabulary has as control tokens, as other vocabularies have those of their families.
CONTROL_MARKS = (
    templates.KIMI.replace("<|calls_begin|>", "<jupyter_start>")
    .replace("<|call_begin|>", "<jupyter_code>")
    .replace("<|argument_begin|>", "<jupyter_text>")
    .replace("<|call_end|>", "<jupyter_output>")
    .replace("<|calls_end|>", "<file_sep>")
    .replace("<|end|>", "<|im_end|>")
)
CONTROL_TAGS = templates.MINIMAX_2.replace("</parameter>", "<file_sep>").replace("<|end|>", "<|im_end|>")
CALLS = [
    (templates.PLAIN, "get_weather"),
    (templates.QWEN, "required"),
    (templates.LLAMA, "get_weather"),
    (templates.MAGISTRAL, "get_weather"),
    (templates.QWEN_CODER, "get_weather"),
    (templates.GLM, "get_weather"),
    (templates.GPT_OSS, "get_weather"),
    (templates.GEMMA_4, "get_weather"),
    (CONTROL_MARKS, "get_weather"),
    (CONTROL_TAGS, "get_weather"),
    (templates.TEXT_TAGS, "get_weather"),
]


@pytest.mark.parametrize(
    ("template", "marks"),
    [(CONTROL_MARKS, ["<jupyter_start>", "<jupyter_output>", "<file_sep>"]), (CONTROL_TAGS, ["<file_sep>"])],
)
def test_marks_are_control_tokens_where_the_vocabulary_has_them(
    loaded: Engine, template: str, marks: list[str]
) -> None:
    config = GenerationConfig(max_tokens=110, tools=(WEATHER,), tool_choice="get_weather")  # type: ignore[arg-type]
    with speaking(loaded, template) as engine:
        answer = engine.generate(ASKED, config)
    vocabulary = loaded.target.model.vocabulary
    for mark in marks:
        (token,) = vocabulary.tokenize(mark, control=True)
        assert vocabulary.is_control(token)
        assert token in answer.tokens
    assert answer.text == ""


@pytest.mark.parametrize(("template", "choice"), slow_except([CALLS[1], CALLS[6]], CALLS))
def test_calls_have_valid_arguments(loaded: Engine, template: str, choice: str) -> None:
    other = {"type": "function", "function": {"name": "get_time"}}
    config = GenerationConfig(max_tokens=220, tools=(WEATHER, other), tool_choice=choice, think="5")  # type: ignore[arg-type]
    with speaking(loaded, template) as engine:
        chunks = list(engine.stream(ASKED, config))
    answer = chunks[-1].generation
    assert answer is not None
    assert answer.tool_calls
    pieces = [piece for chunk in chunks for piece in chunk.calls]
    for index, call in enumerate(answer.tool_calls):
        own = [piece for piece in pieces if piece.index == index]
        assert (own[0].id, own[0].name) == (call.id, call.name)
        assert "".join(piece.arguments for piece in own) == call.arguments
        if answer.finish_reason == "tool_calls" or call is not answer.tool_calls[-1]:
            arguments = json.loads(call.arguments)
            if call.name == "get_weather":
                assert set(arguments) == {"city", "unit"}
                assert arguments["unit"] in ("C", "F")
    if choice == "get_weather":
        assert [call.name for call in answer.tool_calls] == ["get_weather"]
        assert answer.finish_reason == "tool_calls"


def test_tools_and_results_are_shown_to_the_model(loaded: Engine) -> None:
    call = {"id": "abcdefghi", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}
    told = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "I look."},
        {"role": "tool", "content": "Snow <|im_end|>", "tool_call_id": "abcdefghi"},
    ]
    in_json = '"city": "Oslo"'
    for template, arguments in (
        *((template, in_json) for template in (templates.PLAIN, templates.QWEN, templates.LLAMA)),
        (templates.MISTRAL, in_json),
        (templates.QWEN_CODER, "<parameter=city>\nOslo\n</parameter>"),
        (templates.GLM, "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>"),
        (templates.GPT_OSS, in_json),
        (templates.TEXT_TAGS, '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument'),
        (
            templates.GEMMA_4,
            '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,unit:<|"|>C<|"|>}<tool_call|>'
            '<|tool_response>response:get_weather{value:<|"|>Snow',
        ),
    ):
        with speaking(loaded, template) as engine:
            text = rendered(engine, told, tools=(WEATHER,))
            assert (template is templates.GPT_OSS) == ("analysis<|message|>I look.<|end|>" in text)
            for part in ("The weather in a city", arguments, "Snow <|im_end|>", "get_weather"):
                assert part in text, (template, part)
            uncalled = rendered(engine, told, tools=(WEATHER,), tool_choice="none")
            assert uncalled.startswith(text), "the prefix is kept"
            assert uncalled == text
            end = engine.target.model.vocabulary.tokenize("<|im_end|>", control=True)
            harmless = engine.encoder.encode([*told[:2], {**told[2], "content": "Snow"}])
            assert engine.encoder.encode(told).count(end[0]) == harmless.count(end[0])


def test_a_high_effort_is_asked_for_by_the_word_of_the_template(loaded: Engine) -> None:
    with speaking(loaded, templates.QWEN_38) as engine:
        for think, word in (("high", "xhigh"), ("low", "low"), ("medium", "medium"), ("on", "xhigh")):
            assert f"set to {word}<" in rendered(engine, ASKED, think=think)
        assert "effort" not in rendered(engine, ASKED, think="off")


def test_gemma_thinks_in_a_channel(loaded: Engine) -> None:
    with speaking(loaded, templates.GEMMA_4) as engine:
        assert rendered(engine, ASKED).endswith("<|channel>thought\n<channel|>")
        assert rendered(engine, ASKED, think="on").endswith("<|turn>model\n")
        answer = engine.generate(ASKED, GenerationConfig(max_tokens=24, think="5", tools=(WEATHER,)))  # type: ignore[arg-type]
        assert not answer.text.startswith("<|channel>")


def test_an_answer_that_can_only_be_a_text_gets_its_tag(loaded: Engine) -> None:
    tag = "<|open|>response<|sep|>"
    begun = [*ASKED, {"role": "assistant", "content": "It is"}]
    with speaking(loaded, templates.TEXT_TAGS) as engine:
        assert rendered(engine, think="off").endswith(tag)
        answer = engine.generate(ASKED, GenerationConfig(max_tokens=8, think="off"))
        assert (
            answer.text
            == b"".join(map(engine.target.model.vocabulary.piece, answer.tokens)).decode().lstrip()
        )
        tokens, own = engine.encoder.continued(
            begun,
            config=GenerationConfig(tools=(WEATHER,)),
            written={},  # type: ignore[arg-type]
        )
        spelled = b"".join(engine.target.model.vocabulary.piece(t, control=True) for t in tokens).decode()
        assert (spelled.endswith(f"{tag}It is"), own) == (True, None)


@pytest.mark.parametrize("with_tools", slow_except([True], [False, True]))
def test_a_form_holds_behind_the_tag_of_a_text(loaded: Engine, with_tools: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tools: Any = (WEATHER,) if with_tools else ()
    config = GenerationConfig(max_tokens=220, think="5", grammar=Grammar.of_schema(schema), tools=tools)
    with speaking(loaded, templates.TEXT_TAGS) as engine:
        answer = engine.generate(ASKED, config)
    if answer.tool_calls:
        assert set(json.loads(answer.tool_calls[0].arguments)) <= {"city", "unit"}
        assert answer.text == ""
    else:
        assert json.loads(answer.text)["n"] in (1, 2)


def test_calls_are_read_only_where_they_are_offered(loaded: Engine) -> None:
    config = GenerationConfig(tools=(WEATHER,), think="off")  # type: ignore[arg-type]
    answer, _ = Served.here(templates.TEXT_TAGS).answer([("get_weather", {"city": "Oslo"})])
    with speaking(loaded, templates.TEXT_TAGS) as engine:
        for choice, names in (("none", []), ("auto", ["get_weather"])):
            chosen = config.with_(tool_choice=choice)
            prompt = engine.encoder.encode(ASKED, config=chosen)
            parts = engine.maker.planner.plan(engine.encoder, prompt, chosen, raw=False).parts
            assert parts is not None
            parts.push(answer)
            parts.flush()
            assert [found.name for found in parts.calls] == names


def test_what_cannot_be_done_is_said(loaded: Engine) -> None:
    with speaking(loaded, templates.OPENED) as engine:
        with pytest.raises(UsageError, match="cannot call tools"):
            next(Session(engine).ask("Hi", GenerationConfig(tools=(WEATHER,))))  # type: ignore[arg-type]
        bad = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}
        config = GenerationConfig(tools=(bad,), max_tokens=2)  # type: ignore[arg-type]
        assert engine.generate(ASKED, config).tokens
        (sentence,) = engine.not_enforced(config)
        assert sentence.startswith("The schema of the tool f is not enforced. ")


def test_a_conversation_drops_earlier_thoughts(loaded: Engine) -> None:
    with speaking(loaded, templates.OPENED) as engine:
        session = Session(engine)
        list(session.ask("Hi", GenerationConfig(max_tokens=18, think="6")))
        thought = engine.last_generation
        assert thought is not None
        assert thought.reasoning
        assert session.messages[1] == {"role": "assistant", "content": thought.text}
        list(session.ask("And now?", GenerationConfig(max_tokens=16, think="6")))
        assert engine.last_generation is not None
        again = engine.last_generation.tokens
        asked = [*session.messages[:2], {"role": "user", "content": "And now?"}]
        assert engine.generate(asked, GenerationConfig(max_tokens=16, think="6")).tokens == again


def test_log_probabilities_are_those_of_the_target(loaded: Engine) -> None:
    import numpy as np

    answer = loaded.generate(SKY, GenerationConfig(max_tokens=12, logprobs=3))
    assert [found.token for found in answer.logprobs] == answer.tokens
    for found in answer.logprobs:
        assert (found.top[0].token, found.top[0].logprob) == (found.token, found.logprob)  # greedy
        assert found.logprob <= 0
        assert list(found.top) == sorted(found.top, key=lambda other: -other.logprob)
    tokens = loaded.encoder.encode(SKY)
    row = loaded.generate(tokens, GenerationConfig(max_tokens=1, logprobs=20)).logprobs[0]
    assert 0.5 < np.exp([other.logprob for other in row.top]).sum() <= 1 + 1e-9
    assert b"".join(found.spelling for found in answer.logprobs).decode() == answer.text
    assert loaded.generate(SKY, GenerationConfig(max_tokens=3)).logprobs == []
