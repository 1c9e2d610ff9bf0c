"""Calls as chat templates show them: learned from renderings, and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import EdgeSpecError, TemplateError
from edgespec.generation.tools import Tool
from edgespec.models.text.answer_format import AnswerFormat
from edgespec.models.text.answer_parts import AnswerParts
from edgespec.models.text.calls.layout import common_length
from edgespec.models.text.calls.messages import with_calls_for
from edgespec.models.text.calls.probes import segments
from edgespec.models.text.reading import reader_of
from edgespec.models.text.template import ChatTemplate
from tests.unit import templates
from tests.unit.syntaxes import ENDS, LEARNED, format_of, rendered

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "text": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "nested": {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "string"}}},
    },
}
TOOLS = (Tool("get_weather", "The weather.", json.dumps(SCHEMA)), Tool("now", "The time."))
FAMILIES = LEARNED | {
    name: getattr(templates, name)
    for name in ("QWEN", "LLAMA", "MISTRAL", "MAGISTRAL", "QWEN_CODER", "GLM", "GEMMA_4", "PLAIN", "LFM2")
}
FORMATS = {name: format_of(template) for name, template in FAMILIES.items()}

Call = tuple[str, dict[str, Any]]
# Texts of tokens that end the answers of real models, or begin the next turn.
REAL_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<turn|>", "<|tool_response>", "[e~[", "<|eot|>", "<|END_OF_TURN_TOKEN|>"),
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
    *("<|START_OF_TURN_TOKEN|>", "<|end_of_msg|>", "<seed:eos>", "<end_of_sentence>", "<SPECIAL_12>"),
    *("<sep>", "<|role_end|>", "<|message_sep|>", "</assistant>"),
)


def conversation(calls: Sequence[Call], thought: str = "", text: str = "") -> list[Mapping[str, Any]]:
    listed = [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": name, "arguments": values}}
        for n, (name, values) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": text, "tool_calls": listed}
    if thought:
        answer["reasoning_content"] = thought
    return [{"role": "user", "content": "Well?"}, answer]


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


ONE: list[list[Call]] = [
    [("get_weather", {"city": "Oslo"})],
    [("get_weather", {"city": "Os\"lo's \\ \nnew line", "text": "Zürich 東京 😀 <b>&amp;"})],
    [("get_weather", {"city": "x", "days": -3, "ratio": 2.5, "on": True})],
    [("get_weather", {"city": "x", "nested": {"a": [1, {"c": False}], "b": 'q"}'}})],
    [("now", {})],
]
TWO: list[list[Call]] = [
    [("get_weather", {"city": "Oslo", "days": 7}), ("now", {})],
    [("now", {}), ("get_weather", {"city": "A"}), ("get_weather", {"city": "B"})],
]


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


SOURCES = os.environ.get("LLAMA_CPP_TEMPLATES", "")
_OTHERWISE = (
    "Kimi-K3",  # marks behind the end of calls
    *("functionary-medium-v3.2", "muse-glimmer"),  # a message's recipient in its header
)


class Served:
    """A chat template as requests use it: its format, its prompts, and the readers of answers."""

    def __init__(self, chat: ChatTemplate) -> None:
        def show(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
            try:
                return chat.render(messages, False, variables=variables)
            except TemplateError:
                return None

        self._chat = chat
        self.form = AnswerFormat(chat.source, show, lambda mark: mark in REAL_ENDS)

    def answer(self, calls: Sequence[Call]) -> tuple[str, bool]:
        """The answer with these calls behind the prompt, and whether the prompt has opened a thought."""
        question, answer = conversation(calls)
        prompt, whole = self._rendered([question], True), self._rendered([question, answer], False)
        thought = self.form.thought
        opened = thought is not None and prompt.rstrip().endswith(thought.opens)
        if not whole.startswith(prompt):  # earlier answers are shown without the thought that it opens
            begun = segments(prompt)
            opened = False
            prompt = "".join(begun[: common_length(begun, segments(whole))])
            whole = prompt + whole[len(prompt) :].removeprefix(begun[-1])
        text = whole[len(prompt) :]
        ends = (text.find(end, text.index(calls[0][0])) for end in REAL_ENDS)
        return text[: min((end for end in ends if end >= 0), default=len(text))], opened

    def _rendered(self, messages: Sequence[Mapping[str, Any]], begin_answer: bool) -> str:
        calls = self.form.calls
        definitions = [tool.definition for tool in TOOLS]
        variables = self.form.tool_variables(definitions) if calls.shows_tools else {}
        told = with_calls_for(calls, messages, TOOLS)
        return self._chat.render(told, begin_answer, variables=variables)

    def read_back(self, text: str, *, opened: bool) -> tuple[list[Call], str]:
        """The calls in an answer that comes in pieces of one letter, and its text."""
        parts = reader_of(self.form, tools=TOOLS, opened=opened)
        found = [part for letter in text for part in parts.push(letter)] + parts.flush()
        calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
        return calls, "".join(part.text for part in found)


@pytest.mark.skipif(not SOURCES, reason="LLAMA_CPP_TEMPLATES names no folder of llama.cpp's chat templates")
def test_llama_cpps_templates() -> None:
    """Every template that llama.cpp ships: models/templates in its source."""
    failed: dict[str, list[Any]] = {}
    for path in sorted(Path(SOURCES).glob("*.jinja")):
        if any(name in path.name for name in _OTHERWISE):
            continue
        with ChatTemplate(path.read_text(), "<s>", "</s>") as chat:
            served = Served(chat)
            for calls in ONE + TWO:
                if served.form.calls.single and len(calls) > 1:
                    continue
                try:
                    text, opened = served.answer(calls)
                    found: Any = served.read_back(text, opened=opened)
                except (ValueError, EdgeSpecError) as error:
                    found = repr(error)
                # R1-Distill-Llama's ends the calls behind the second one, whatever follows.
                ended = 2 if "R1-Distill-Llama" in path.name else len(calls)
                if found != (calls[:ended], ""):
                    failed.setdefault(path.name, []).append((calls, found))
    assert not failed
