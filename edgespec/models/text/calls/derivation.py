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
from edgespec.models.text.calls.layout import (
    ID,
    INDEX,
    KEY,
    OPTIONAL_CLOSES,
    OPTIONAL_OPENS,
    TEXT_TYPE,
    CallLayout,
    TaggedArguments,
)
from edgespec.models.text.calls.pythonic import PythonicSpelling
from edgespec.models.text.calls.reader import CallEnd, CallName
from edgespec.models.text.calls.spelling import LayoutSpelling

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Sequence[Mapping[str, Any]]], str | None]
"""Renders a conversation and its tools; None if the template refuses them."""

_QUESTION, _ANSWER = "probequestion", "probeanswer"
_NAMES = ("probealpha", "probebeta")
_IDS = ("probeid01", "probeid02")
_NAMED_IDS = ("functions.probealpha:0", "functions.probebeta:1")  # of templates that show ids only (Kimi)
# The names are in alphabetical order, since some templates sort them.
_VALUES: dict[str, Any] = {
    "arga": "probetext",
    "argb": "another text",
    "argc": 7,
    "argd": 1.5,
    "arge": True,
    "argf": None,
    "argg": ["x", 1],
    "argh": {"y": True},
    "argi": "last text",
}
_TYPES = {
    "argc": "integer",
    "argd": "number",
    "arge": "boolean",
    "argf": "null",
    "argg": "array",
    "argh": "object",
}
_MAX_CHARS = 1 << 16

# Where two renderings begin to differ within a mark, the whole mark differs.
_SEGMENT = re.compile(r"<[^<>]*>?|\[[A-Z_/]+\]|\s+|\d+|\w+|.", re.DOTALL)
_MARK = re.compile(r"<[^<>]*>?|\[[A-Z_/]+\]")
_JSON_BEGINS = re.compile(r'[\[{]\s*(?:[\[{]\s*)*"')


def _tool(name: str, types: Mapping[str, str]) -> dict[str, Any]:
    properties = {key: {"type": types.get(key, TEXT_TYPE), "description": "A value."} for key in _VALUES}
    parameters = {"type": "object", "properties": properties, "required": ["arga"]}
    return {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": parameters},
    }


# Some templates do not know every type.
_PROBES = [[_tool(name, types) for name in _NAMES] for types in (_TYPES | {"argf": TEXT_TYPE}, {})]


@dataclass(frozen=True)
class DerivedCalls:
    """What renderings tell of a template's calls.

    Attributes:
        trigger: the text by which a call is told from other text.
        trigger_is_json: calls are bare JSON, which begins with the trigger.
        single: the template shows at most one call for each message.
        shows_results: the template shows what tools return.
        arguments_as_text: the template takes arguments as JSON text, not as objects.
        empty_content: the content of a message without text that the template takes, "" or None.
    """

    spelling: LayoutSpelling | PythonicSpelling
    trigger: str
    trigger_is_json: bool
    single: bool
    shows_results: bool
    arguments_as_text: bool
    empty_content: str | None


def derive(
    render: Render, *, thought_closes: str = "", is_end: Callable[[str], bool] = lambda mark: False
) -> DerivedCalls | None:
    """Learn how a template shows calls; None if it shows none, or in a way that layouts cannot express.

    Args:
        thought_closes: the mark that ends a thought; what comes before it does not belong to a call.
        is_end: whether a mark is the text of a token that ends answers.
    """
    return _Derivation(render, thought_closes, is_end).derived()


class _Derivation:
    def __init__(self, render: Render, thought_closes: str, is_end: Callable[[str], bool]) -> None:
        self._render = render
        self._thought_closes = thought_closes
        self._is_end = is_end
        self._as_text = False
        self._content: str | None = ""
        self._ids = _IDS
        self._plain: list[str] = []
        self._probes: Sequence[Mapping[str, Any]] = ()

    def derived(self) -> DerivedCalls | None:
        plain = None
        for self._probes in _PROBES:
            plain = plain or self._body([{"role": "assistant", "content": _ANSWER}])
            if plain is not None:
                break
        single = self._settled({"arga": "probetext"}) if plain is not None else None
        if plain is None or single is None:
            return None
        self._plain = _segments(plain)
        one = self._section(single)
        two = self._shown([(_NAMES[0], {"arga": "probetext"}), (_NAMES[1], {"arga": "probetext"})])
        both = self._section(two) if two is not None and _NAMES[1] in two else None
        split = _Split.of(one, both) if one is not None else None
        if one is None or split is None:
            return None
        spelling, trigger, is_json = self._spelling(split)
        if spelling is None or not _reads(spelling, trigger, one, is_json=is_json):
            return None
        results = self._shows_results()
        return DerivedCalls(spelling, trigger, is_json, both is None, results, self._as_text, self._content)

    def _spelling(self, split: _Split) -> tuple[LayoutSpelling | PythonicSpelling | None, str, bool]:
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
        call = self._call(0, _NAMES[0], {"arga": "probetext"})
        result = {"role": "tool", "tool_call_id": call["id"], "name": _NAMES[0], "content": "proberesult"}
        called = {"role": "assistant", "content": self._content, "tool_calls": [call]}
        shown = self._body([called, result])
        return shown is not None and "proberesult" in shown

    def _settled(self, values: Mapping[str, Any]) -> str | None:
        """The rendering of a call, in the form of message that the template takes."""
        for self._ids in (_IDS, _NAMED_IDS):
            for self._as_text in (False, True):
                for self._content in ("", None):
                    shown = self._shown([(_NAMES[0], values)])
                    if shown is not None and _NAMES[0] in shown and "probetext" in shown:
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

    def _body(self, answer: Messages) -> str | None:
        text = self._render([{"role": "user", "content": _QUESTION}, *answer], self._probes)
        if text is None or _QUESTION not in text:
            return None
        body = text.rpartition(_QUESTION)[2]
        return body if len(body) <= _MAX_CHARS else None

    def _section(self, shown: str) -> str | None:
        """The part of a rendering that an answer without calls has not."""
        segments = _segments(shown)
        begin = _common(segments, self._plain)
        end = _common(segments[begin:][::-1], self._plain[begin:][::-1])
        section = "".join(segments[begin : len(segments) - end])
        behind = section.find(_NAMES[0])
        if behind < 0:
            return None
        if self._thought_closes:
            at = section.rfind(self._thought_closes, 0, behind)
            section = section[at + len(self._thought_closes) :] if at >= 0 else section
            behind = section.find(_NAMES[0])
        ends = (mark.start() for mark in _MARK.finditer(section, behind) if self._is_end(mark[0]))
        return section[: next(ends, len(section))]

    def _trigger(self, opens: str) -> tuple[str, bool]:
        """The beginning of a call's text that no other answer has, and whether it is part of JSON."""
        begun = opens.lstrip()
        bracket = _JSON_BEGINS.search(begun)
        if bracket is not None and bracket.start() == 0:
            found = re.match(r'[\[{]\s*"\w+"\s*:', begun)
            return (found[0], True) if found is not None and begun[0] == "{" else ("", False)
        plain = set(self._plain)
        at = 0
        for segment in _segments(begun):
            at += len(segment)
            if segment.isspace() or segment in plain:
                continue
            if _MARK.fullmatch(segment):
                return begun[:at].rstrip(), False
            break
        # Words might stand in any text, so as many as there are before the JSON.
        if bracket is not None and "\n" in begun[: bracket.start()]:
            return begun[: bracket.start()].rstrip(), False
        words = re.match(r"\S+", begun)
        return (words[0], False) if words is not None and words[0] not in plain else ("", False)

    def _tagged(self, split: _Split) -> CallLayout | None:
        """The layout of calls whose arguments stand between tags."""
        shown = self._shown([(_NAMES[0], _VALUES)])
        section = self._section(shown) if shown is not None else None
        if section is None:
            return None
        listed = [key for key in _VALUES if key in section]  # some templates leave out what is null
        parts = _parts(section, [_NAMES[0], *listed])
        if parts is None or listed[:2] != ["arga", "argb"] or listed[-1] != "argi":
            return None
        return _tagged_layout(split, parts[1], dict(zip(listed, parts[2:], strict=True)))


@dataclass(frozen=True)
class _Split:
    """A section with one call, and one with two, cut at names and arguments.

    Attributes:
        opens, inside, between: the texts before the first name, behind it, and before the second one.
        last: the text behind the last name.
    """

    opens: str
    inside: str
    between: str
    last: str

    @classmethod
    def of(cls, one: str, both: str | None) -> _Split | None:
        pieces = one.split(_NAMES[0])
        if len(pieces) != 2:
            return None
        opens, inside = pieces
        between, last = "", inside
        if both is not None:
            begun = both.split(_NAMES[0])
            following = begun[-1].split(_NAMES[1])
            if len(begun) != 2 or len(following) != 2:
                return None
            between, last = following
        return cls(*(_with_ids(text) for text in (opens, inside, between, last)))

    def pythonic(self) -> PythonicSpelling | None:
        """The spelling of calls that are expressions of Python; None if they are something else."""
        opens, ends = self.opens.strip(), self.last.strip()
        called = re.fullmatch(r"""\(arga=(['"])probetext\1\)\](.+)""", ends)
        if called is None or not opens.endswith("["):
            return None
        return PythonicSpelling(opens.removesuffix("["), called[2])

    def layout(self) -> CallLayout | None:
        """The layout of calls whose arguments are one JSON object; None if they are something else."""
        first = _cut_at_json(self.between or self.inside)
        last = _cut_at_json(self.last)
        if first is None or last is None:
            return None
        middle, between = first
        other, closes = last
        middle, other = _with_indices(middle, other)
        opens, between = _with_indices_at_end(self.opens, between if self.between else "")
        if middle != other:
            return None
        middle, closes, between = map(_with_optional_ids, (middle, closes, between))
        return _sectioned(opens.lstrip(), middle, closes, between)


def _sectioned(
    opens: str, middle: str, closes: str, between: str, tags: TaggedArguments | None = None
) -> CallLayout:
    """The layout, in which calls that repeat all marks have sections of their own."""
    closes = closes.rstrip()
    repeats = _squeezed(between) == _squeezed(closes + opens)
    return CallLayout(opens, middle, closes, "" if repeats else between, tags)


def _tagged_layout(split: _Split, first: str, behind: Mapping[str, str]) -> CallLayout | None:
    """The layout of calls with tags.

    Args:
        first: the text between the call's name and the name of its first argument.
        behind: the text from each argument's name to the next one's, or to the end.
    """
    joints = [_around(behind[key], _VALUES[key], key) for key in ("arga", "argb", "argi")]
    first_joint, second_joint, last_joint = joints
    if first_joint is None or first_joint != second_joint or last_joint is None:
        return None
    text_middle, joint = first_joint
    # What stands before the first argument's name and before others' alike is the tag that opens it.
    before, between = _segments(first), _segments(joint)
    shared = _common(before[::-1], between[::-1])
    opens, closes = "".join(before[len(before) - shared :]), "".join(between[: len(between) - shared])
    if not (opens.strip() and closes.strip() and text_middle and last_joint[1].startswith(closes)):
        return None
    middle = "".join(before[: len(before) - shared])
    call_closes, call_between = last_joint[1].removeprefix(closes), ""
    if split.between:
        to_next = _around(split.between, "probetext", "arga")
        to_end = _around(split.last, "probetext", "arga")
        if to_next is None or to_end is None or not to_next[1].startswith(closes):
            return None
        call_between, call_closes = to_next[1].removeprefix(closes), to_end[1].removeprefix(closes)
        middle = _with_indices(middle, to_end[0].partition("arga")[0].removesuffix(opens))[0]
    call_opens, call_between = _with_indices_at_end(split.opens, call_between)
    middles, words = _other_values(behind, joint, text_middle)
    tags = TaggedArguments(opens, middles, closes, words)
    return _sectioned(call_opens.lstrip(), middle, call_closes, call_between, tags)


def _other_values(
    behind: Mapping[str, str], joint: str, text_middle: str
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """What stands before values by their types, and the words that are not written as in JSON."""
    middles = {TEXT_TYPE: text_middle}
    words: list[tuple[str, str]] = []
    for key, kind in _TYPES.items():
        text, value = behind.get(key, "").replace(key, KEY), json.dumps(_VALUES[key])
        written = next((w for w in (value, str(_VALUES[key])) if text.endswith(w + joint)), None)
        if written is None:  # it is left out, or written in a way that is not known here
            continue
        middles[kind] = text.removesuffix(written + joint)
        if written != value and kind == "boolean":
            words += [("true", "True"), ("false", "False")]
        elif written != value and kind == "null":
            words.append((value, written))
    middles[""] = middles.get("object", text_middle)
    alike = len(set(middles.values())) == 1
    return ((("", text_middle),) if alike else tuple(middles.items())), tuple(words)


def _reads(spelling: LayoutSpelling | PythonicSpelling, trigger: str, section: str, *, is_json: bool) -> bool:
    """True if the call of a probe is read as it was."""
    at = section.find(trigger)
    text = section[at if is_json else at + len(trigger) :]
    reader = spelling.reader([Tool.of(probe) for probe in _PROBES[-1]])
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
        return name == _NAMES[0] and json.loads(arguments) == {"arga": "probetext"}
    except ValueError:
        return False


def _segments(text: str) -> list[str]:
    return _SEGMENT.findall(text)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the segments that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _around(text: str, value: str, key: str) -> tuple[str, str] | None:
    """The text before and behind a value, with a slot for its argument's name; None if it is not there."""
    before, found, behind = text.partition(value)
    return (before, behind.replace(key, KEY)) if found else None


def _parts(text: str, names: Sequence[str]) -> list[str] | None:
    """The text before, between and behind names that stand there in this order."""
    parts = []
    for name in names:
        before, found, text = text.partition(name)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]


def _cut_at_json(text: str) -> tuple[str, str] | None:
    """The text before the first JSON object with the argument of a probe, and the text behind it."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, found.start())
        except ValueError:
            continue
        if value == {"arga": "probetext"}:
            return text[: found.start()], text[end:]
    return None


def _with_ids(text: str) -> str:
    for call_id in _IDS:
        text = text.replace(call_id, ID)
    return text


def _with_indices(one: str, other: str) -> tuple[str, str]:
    """Two texts of the first and second call, with a slot where they differ in a number."""
    a, b = _segments(one), _segments(other)
    if len(a) != len(b):
        return one, other
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y and x.isdigit() and y.isdigit():
            a[n] = b[n] = INDEX
    return "".join(a), "".join(b)


def _with_indices_at_end(one: str, other: str) -> tuple[str, str]:
    """The same for two texts of which only the ends are alike."""
    a, b = _segments(one), _segments(other)
    for n in range(1, min(len(a), len(b)) + 1):
        if a[-n] != b[-n]:
            if not (a[-n].isdigit() and b[-n].isdigit()):
                break
            a[-n] = b[-n] = INDEX
    return "".join(a), "".join(b)


_JSON_ID = re.compile(rf'\s*,\s*"\w+"\s*:\s*"{ID}"')
_MARKED_ID = re.compile(rf"\[[A-Z_]+\]{ID}")


def _with_optional_ids(text: str) -> str:
    """The text in which an id may be left out, since models do not always write one."""
    for found in (_JSON_ID, _MARKED_ID):
        text = found.sub(lambda m: f"{OPTIONAL_OPENS}{m[0]}{OPTIONAL_CLOSES}", text)
    return text


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
