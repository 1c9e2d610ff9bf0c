"""Learn from a chat template how its model calls tools: render conversations with calls, and compare.

A template that shows the calls of earlier answers shows them as the model was trained to write them. So the
text around names, arguments and values follows from renderings that differ in one thing each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.generation.tools import Tool
from edgespec.text.calls.layout import CallLayout, common_length
from edgespec.text.calls.probes import (
    ANSWER,
    FIRST,
    IDS,
    LAST,
    MARK,
    NAMED_IDS,
    NAMES,
    ONE_VALUE,
    QUESTION,
    RESULT,
    THOUGHT,
    TOOLS,
    VALUES,
    segments,
)
from edgespec.text.calls.pythonic import PythonicSpelling
from edgespec.text.calls.reader import CallEnd, CallName
from edgespec.text.calls.sections import SplitSection, parts_around, tagged_layout
from edgespec.text.calls.spelling import LayoutSpelling

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Sequence[Mapping[str, Any]], bool], str | None]
"""Renders a conversation and its tools, up to where the model answers if it is to; None if it is refused."""

_MAX_CHARS = 1 << 16
_BRACKETS = re.compile(r"[\[{][\s\[{]*")


@dataclass(frozen=True)
class DerivedCalls:
    """The calls of a template, as renderings show them."""

    spelling: LayoutSpelling | PythonicSpelling
    trigger: str  # the text by which a call is told from other text
    trigger_is_json: bool  # calls are bare JSON, which begins with the trigger
    single: bool  # the template shows at most one call for each message
    shows_results: bool  # the template shows what tools return
    arguments_as_text: bool  # the template takes arguments as JSON text, not as objects
    empty_content: str | None  # the content of a message without text that the template takes, "" or None


def derive(
    render: Render,
    *,
    thought_closes: str = "",
    text_closes: str = "",
    is_end: Callable[[str], bool] = lambda mark: False,
) -> DerivedCalls | None:
    """Learn how a template shows calls; None if it shows none, or in a way that layouts cannot express.

    Args:
        thought_closes: the mark that ends a thought; what comes before it does not belong to a call.
        text_closes: the mark that ends a text.
        is_end: whether a mark is the text of a token that ends answers.
    """
    return _Derivation(render, thought_closes, text_closes, is_end).derived()


def shown_texts(render: Render) -> tuple[str, str] | None:
    """A thought with a text, and a text with a call, as a template shows them; None if without marks.

    Both are what stands behind a question.
    """
    return _Derivation(render, "", "", lambda mark: False).texts()


class _Derivation:
    def __init__(
        self,
        render: Render,
        thought_closes: str,
        text_closes: str,
        is_end: Callable[[str], bool],
    ) -> None:
        self._render = render
        self._thought_closes = thought_closes
        self._text_closes = text_closes
        self._is_end = is_end
        self._as_text = False
        self._content: str | None = ""
        self._ids = IDS
        self._plain: list[str] = []
        self._probes: Sequence[Mapping[str, Any]] = ()

    def texts(self) -> tuple[str, str] | None:
        said = {"role": "assistant", "content": ANSWER}
        prompt, text = self._body([], begin_answer=True), self._body([said])
        if not prompt or text is None or not text.startswith(prompt):
            return None
        if not text[len(prompt) :].partition(ANSWER)[0].strip():
            return None
        thoughtful = self._body([{**said, "reasoning_content": THOUGHT}])
        for self._probes in TOOLS:
            if self._settled(ONE_VALUE) is not None:
                break
        calling = self._body([{**said, "tool_calls": [self._call(0, NAMES[0], ONE_VALUE)]}])
        return (thoughtful, calling) if thoughtful and THOUGHT in thoughtful and calling else None

    def derived(self) -> DerivedCalls | None:
        plain = None
        for self._probes in TOOLS:
            plain = plain or self._body([{"role": "assistant", "content": ANSWER}])
            if plain is not None:
                break
        single = self._settled(ONE_VALUE) if plain is not None else None
        if plain is None or single is None:
            return None
        self._plain = segments(plain)
        one = self._section(single)
        two = self._shown([(NAMES[0], ONE_VALUE), (NAMES[1], ONE_VALUE)])
        both = self._section(two) if two is not None and NAMES[1] in two else None
        split = SplitSection.of(one, both) if one is not None else None
        if one is None or split is None:
            return None
        spelling, trigger, is_json = self._spelling(split)
        if spelling is None or not _reads(spelling, trigger, one, is_json=is_json):
            return None
        results = self._shows_results()
        return DerivedCalls(spelling, trigger, is_json, both is None, results, self._as_text, self._content)

    def _spelling(self, split: SplitSection) -> tuple[LayoutSpelling | PythonicSpelling | None, str, bool]:
        """The spelling, its trigger, and whether that is part of JSON."""
        pythonic = split.pythonic()
        if pythonic is not None:
            return pythonic, pythonic.opens, False
        layout = split.layout() or self._tagged(split)
        if layout is None:
            return None, "", False
        trigger, is_json = self._trigger(layout.opens)
        spelling = LayoutSpelling(layout, "" if is_json else trigger)
        return (spelling if trigger else None), trigger, is_json

    def _shows_results(self) -> bool:
        call = self._call(0, NAMES[0], ONE_VALUE)
        result = {"role": "tool", "tool_call_id": call["id"], "name": NAMES[0], "content": RESULT}
        called = {"role": "assistant", "content": self._content, "tool_calls": [call]}
        shown = self._body([called, result])
        return shown is not None and RESULT in shown

    def _settled(self, values: Mapping[str, Any]) -> str | None:
        """The rendering of a call, in the form of message that the template takes."""
        for self._ids in (IDS, NAMED_IDS):
            for self._as_text in (False, True):
                for self._content in ("", None):
                    shown = self._shown([(NAMES[0], values)])
                    if shown is not None and NAMES[0] in shown and VALUES[FIRST] in shown:
                        return shown
        return None

    def _shown(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """The rendering of an answer that calls tools, behind the question."""
        listed = [self._call(n, name, values) for n, (name, values) in enumerate(calls)]
        return self._body([{"role": "assistant", "content": self._content, "tool_calls": listed}])

    def _call(self, index: int, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(values) if self._as_text else dict(values)
        function = {"name": name, "arguments": arguments}
        return {"id": self._ids[index], "type": "function", "function": function}

    def _body(self, answer: Messages, *, begin_answer: bool = False) -> str | None:
        text = self._render([{"role": "user", "content": QUESTION}, *answer], self._probes, begin_answer)
        if text is None or QUESTION not in text:
            return None
        body = text.rpartition(QUESTION)[2]
        return body if len(body) <= _MAX_CHARS else None

    def _section(self, shown: str) -> str | None:
        """The part of a rendering that an answer without calls has not."""
        parts = segments(shown)
        begin = common_length(parts, self._plain)
        end = common_length(parts[begin:][::-1], self._plain[begin:][::-1])
        if self._text_closes:
            rest = "".join(self._plain).partition(ANSWER)[2].removeprefix(self._text_closes)
            end = min(end, len(segments(rest)))
        section = "".join(parts[begin : len(parts) - end])
        behind = section.find(NAMES[0])
        if behind < 0:
            return None
        if self._thought_closes:
            at = section.rfind(self._thought_closes, 0, behind)
            section = section[at + len(self._thought_closes) :] if at >= 0 else section
            behind = section.find(NAMES[0])
        ends = (mark.start() for mark in MARK.finditer(section, behind) if self._is_end(mark[0]))
        return section[: next(ends, len(section))]

    def _trigger(self, opens: str) -> tuple[str, bool]:
        """The beginning of a call's text that no other answer has, and whether it is part of JSON."""
        begun = opens.lstrip()
        runs = _BRACKETS.finditer(begun)
        bracket = next((run for run in runs if begun.startswith('"', run.end())), None)
        if bracket is not None and bracket.start() == 0:
            found = re.match(r'[\[{]\s*"\w+"\s*:', begun)
            return (found[0], True) if found is not None and begun[0] == "{" else ("", False)
        plain = set(self._plain)
        at = 0
        for segment in segments(begun):
            at += len(segment)
            if segment.isspace() or segment in plain:
                continue
            if MARK.fullmatch(segment):
                return begun[:at].rstrip(), False
            break
        # Words might stand in any text, so as many as there are before the JSON.
        if bracket is not None and "\n" in begun[: bracket.start()]:
            return begun[: bracket.start()].rstrip(), False
        words = re.match(r"\S+", begun)
        return (words[0], False) if words is not None and words[0] not in plain else ("", False)

    def _tagged(self, split: SplitSection) -> CallLayout | None:
        """The layout of calls whose arguments stand between tags."""
        shown = self._shown([(NAMES[0], VALUES)])
        section = self._section(shown) if shown is not None else None
        if section is None:
            return None
        listed = [key for key in VALUES if key in section]  # some templates leave out what is null
        parts = parts_around(section, [NAMES[0], *listed])
        if parts is None or listed[:2] != [FIRST, "argb"] or listed[-1] != LAST:
            return None
        return tagged_layout(split, parts[1], dict(zip(listed, parts[2:], strict=True)))


def _reads(spelling: LayoutSpelling | PythonicSpelling, trigger: str, section: str, *, is_json: bool) -> bool:
    """True if the call of a probe is read as it was."""
    at = section.find(trigger)
    text = section[at if is_json else at + len(trigger) :] if at >= 0 else section
    reader = spelling.reader([Tool.of(probe) for probe in TOOLS[-1]])
    name, arguments = "", ""
    while True:
        read, rest = reader.read(text)
        if isinstance(read, CallEnd) or (not read and rest == text):
            break
        if isinstance(read, CallName):
            name += read.name
        else:
            arguments += read
        text = rest
    try:
        return name == NAMES[0] and json.loads(arguments) == ONE_VALUE
    except ValueError:
        return False
