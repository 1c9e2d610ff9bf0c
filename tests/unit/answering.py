"""Answers as a chat template shows them behind the prompt of a request, and read as a request's are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import UndefinedError

from edgespec.errors import TemplateError
from edgespec.generation.tools import Tool
from edgespec.text.answer_format import AnswerFormat
from edgespec.text.calls.layout import common_length
from edgespec.text.calls.messages import with_calls_for
from edgespec.text.calls.probes import segments
from edgespec.text.reading import reader_of
from edgespec.text.template_worker import Refused
from tests.unit.syntaxes import rendered

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


Messages = Sequence[Mapping[str, Any]]


class Served:
    """A chat template as requests use it: its format, its prompts, and the readers of answers.

    Args:
        render: renders a conversation, up to where the model answers if it is to, with variables.
        refusals: what it raises.
    """

    def __init__(
        self,
        source: str,
        render: Callable[[Messages, bool, Mapping[str, Any]], str],
        refusals: tuple[type[Exception], ...] = (TemplateError,),
    ) -> None:
        def show(messages: Messages, variables: Mapping[str, Any], begin_answer: bool) -> str | None:
            try:
                return render(messages, begin_answer, variables)
            except refusals:
                return None

        self._render = render
        self.form = AnswerFormat(source, show, lambda mark: mark in REAL_ENDS)

    @classmethod
    def here(cls, source: str) -> Served:
        """A template that is rendered in this process."""

        def render(messages: Messages, begin_answer: bool, variables: Mapping[str, Any]) -> str:
            return rendered(source, messages, variables, begin_answer=begin_answer)

        return cls(source, render, (Refused, TypeError, UndefinedError))

    def answer(self, calls: Sequence[Call], thought: str = "", text: str = "") -> tuple[str, bool]:
        """The answer with this behind the prompt, and whether the prompt has opened a thought."""
        question, answer = conversation(calls, thought, text)
        if not calls:
            answer = {key: value for key, value in answer.items() if key != "tool_calls"}
        prompt, whole = self._rendered([question], True), self._rendered([question, answer], False)
        marks = self.form.thought
        opened = marks is not None and prompt.rstrip().endswith(marks.opens)
        if not whole.startswith(prompt):  # earlier answers are shown without the thought that it opens
            begun = segments(prompt)
            opened = False
            prompt = "".join(begun[: common_length(begun, segments(whole))])
            whole = prompt + whole[len(prompt) :].removeprefix(begun[-1])
        said = whole[len(prompt) :]
        start = said.index(calls[0][0] if calls else text)
        ends = (said.find(end, start) for end in REAL_ENDS)
        return said[: min((end for end in ends if end >= 0), default=len(said))], opened

    def _rendered(self, messages: Messages, begin_answer: bool) -> str:
        calls = self.form.calls
        definitions = [tool.definition for tool in TOOLS]
        variables = self.form.tool_variables(definitions) if calls.shows_tools else {}
        return self._render(with_calls_for(calls, messages, TOOLS), begin_answer, variables)

    def read_back(
        self, text: str, *, opened: bool = False, cuts: Sequence[int] | None = None
    ) -> tuple[list[Call], str, str]:
        """The calls in an answer that comes in pieces, its text and its thought.

        Args:
            opened: the prompt has opened a thought.
            cuts: where its pieces begin; None for single letters.
        """
        parts = reader_of(self.form, tools=TOOLS, opened=opened)
        cuts = range(1, len(text)) if cuts is None else cuts
        pieces = (text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))
        found = [part for piece in pieces for part in parts.push(piece)] + parts.flush()
        calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
        return calls, "".join(part.text for part in found), "".join(part.reasoning for part in found)
