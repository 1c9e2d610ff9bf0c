"""Calls as chat templates show them: learned from renderings, and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.text.answer_format import AnswerFormat
from edgespec.text.answer_parts import AnswerParts
from edgespec.text.calls.messages import with_calls_for
from edgespec.text.calls.syntax import CallSyntax
from tests.unit import templates
from tests.unit.answering import ONE, TOOLS, TWO, Call, conversation
from tests.unit.syntaxes import ENDS, LEARNED, format_of, rendered

FAMILIES = LEARNED | {
    name: getattr(templates, name)
    for name in ("QWEN", "LLAMA", "MISTRAL", "MAGISTRAL", "QWEN_CODER", "GLM", "GEMMA_4", "PLAIN", "LFM2")
}
FORMATS = {name: format_of(template) for name, template in FAMILIES.items()}


def shown(form: AnswerFormat, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """What the template shows behind the question."""
    definitions = [tool.definition for tool in TOOLS]
    variables = form.tool_variables(definitions) if form.calls.shows_tools else {}
    text = rendered(template, with_calls_for(form.calls, messages, TOOLS), variables)
    return text.rpartition("Well?")[2]


def written(form: AnswerFormat, template: str, calls: Sequence[Call]) -> str:
    """The calls as the template shows them, up to the token that ends the answer."""
    text = shown(form, template, conversation(calls))
    text = text[text.index(form.calls.trigger) :]
    return text[: min((text.index(end) for end in ENDS if end in text), default=len(text))]


def read_back(form: AnswerFormat, text: str, cuts: Sequence[int] = ()) -> tuple[list[Call], str]:
    """The calls in an answer that comes in pieces, and its text."""
    parts = AnswerParts(None, syntax=form.calls, tools=TOOLS)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += parts.push(text[start:end])
    found += parts.flush()
    calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    return calls, "".join(part.text for part in found)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("calls", ONE + TWO)
def test_calls_are_read_as_the_template_shows_them(name: str, calls: list[Call]) -> None:
    form = FORMATS[name]
    if form.calls.single and len(calls) > 1:
        pytest.skip("the template shows one call at once")
    text = written(form, FAMILIES[name], calls)
    for cuts in ((), range(1, len(text))):
        assert read_back(form, text, list(cuts)) == (calls, "")


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS.filter(str.strip),
        "days": st.integers(-99, 99),
        "ratio": st.floats(-9, 9),
        "on": st.booleans(),
        "nested": st.fixed_dictionaries({}, optional={"a": st.lists(st.integers(0, 9), max_size=2)}),
    },
)


@settings(deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), VALUES, st.data())
def test_any_call_is_read_in_any_pieces(name: str, values: dict[str, Any], data: st.DataObject) -> None:
    form = FORMATS[name]
    calls = [("get_weather", values)]
    text = written(form, FAMILIES[name], calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert read_back(form, text, cuts) == (calls, "")


@pytest.mark.parametrize("name", ["KIMI", "DEEPSEEK", "MINIMAX_2", "PYTHONIC"])
def test_text_and_calls_stand_beside_each_other(name: str) -> None:
    form = FORMATS[name]
    calls: list[Call] = [("get_weather", {"city": "Oslo"})]
    text = written(form, FAMILIES[name], calls)
    assert read_back(form, f"Let me see.\n{text}") == (calls, "Let me see.")


def test_a_template_that_takes_one_call_gets_a_message_for_each() -> None:
    form = FORMATS["LLAMA"]
    calls: list[Call] = [("get_weather", {"city": "Oslo"}), ("now", {})]
    results = [{"role": "tool", "tool_call_id": f"abcdefgh{n}", "content": f"result {n}"} for n in range(2)]
    text = shown(form, FAMILIES["LLAMA"], [*conversation(calls), *results])
    assert text.index("get_weather") < text.index("result 0") < text.index('"now"') < text.index("result 1")


def test_a_template_that_shows_the_first_call_only_gets_a_message_for_each() -> None:
    form = format_of(templates.GPT_OSS)
    calls: list[Call] = [("get_weather", {"city": "Oslo"}), ("now", {})]
    results = [{"role": "tool", "tool_call_id": f"abcdefgh{n}", "content": f"result {n}"} for n in range(2)]
    text = shown(form, templates.GPT_OSS, [*conversation(calls), *results])
    assert text.index("get_weather") < text.index("result 0") < text.index(".now") < text.index("result 1")


def test_arguments_are_text_where_the_template_joins_texts() -> None:
    template = templates.DEEPSEEK.replace("(values | tojson)", "values")
    form = format_of(template)
    assert form.calls.arguments_as_text
    calls: list[Call] = [("get_weather", {"city": "Oslo"})]
    assert read_back(form, written(form, template, calls)) == (calls, "")


@pytest.mark.parametrize("name", ["PLAIN", "LFM2"])
def test_calls_are_written_for_templates_that_show_none(name: str) -> None:
    form = FORMATS[name]
    text = shown(form, FAMILIES[name], conversation([("get_weather", {"city": "Oslo"})], text="Well."))
    assert text.index("Well.") < text.index(form.calls.trigger) < text.index("Oslo")


def test_a_template_may_show_calls_and_no_tools() -> None:
    """As DeepSeek R1's does: the tools are described in the form of call that the template shows."""
    template = templates.DEEPSEEK.replace("{%- if tools %}{{ (tools | tojson) + '\\n' }}{%- endif %}", "")
    form = format_of(template)
    assert form.calls.trigger == FORMATS["DEEPSEEK"].calls.trigger
    assert not form.calls.shows_tools
    told = with_calls_for(form.calls, [{"role": "user", "content": "Well?"}], TOOLS)
    assert told[0]["role"] == "system"
    assert "get_weather" in told[0]["content"]
    assert form.calls.trigger in told[0]["content"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}{#- tools -#}{{ tools }}",
        "{% for m in messages %}{{ m.tool_calls }}{% endfor %}{{ tools }}",
        "{{ tools }}" + "probealpha" * 50,
        "{{ tools }}{% for m in messages %}{{ m.tool_calls[0].function.name * 99 }}{% endfor %}",
    ],
)
def test_what_cannot_be_learned_is_taught(template: str) -> None:
    assert format_of(template).calls.name == "generic"


def test_a_call_each_stands_before_its_result_even_if_ids_are_used_again() -> None:
    def turn(*results: str) -> list[dict[str, Any]]:
        calls = [
            {"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"
        ]
        answers = [
            {"role": "tool", "tool_call_id": name, "content": text}
            for name, text in zip("gf", results, strict=True)
        ]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]

    messages = [*turn("1st g", "1st f"), {"role": "user", "content": "And?"}, *turn("2nd g", "2nd f")]
    told = with_calls_for(CallSyntax("", "<tool_call>", None, single=True), messages, ())
    said = [m["content"] or m["tool_calls"][0]["id"] for m in told]
    assert said == ["f", "1st f", "g", "1st g", "And?", "f", "2nd f", "g", "2nd g"]
