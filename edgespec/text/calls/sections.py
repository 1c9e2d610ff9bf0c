"""Layouts of calls, from sections of text that a chat template has rendered for the probes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgespec.text.calls.layout import (
    ID,
    INDEX,
    KEY,
    OPTIONAL_CLOSES,
    OPTIONAL_OPENS,
    TEXT_TYPE,
    CallLayout,
    TaggedArguments,
    common_length,
)
from edgespec.text.calls.probes import (
    FIRST,
    IDS,
    LAST,
    NAMES,
    ONE_VALUE,
    TYPES,
    VALUES,
    segments,
)
from edgespec.text.calls.pythonic import PythonicSpelling

_JSON_ID = re.compile(rf'\s*,\s*"\w+"\s*:\s*"{ID}"')
_MARKED_ID = re.compile(rf"\[[A-Z_]+\]{ID}")
_MAX_OBJECTS = 16


@dataclass(frozen=True)
class SplitSection:
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
    def of(cls, one: str, both: str | None) -> SplitSection | None:
        pieces = one.split(NAMES[0])
        if len(pieces) != 2:
            return None
        opens, inside = pieces
        between, last = "", inside
        if both is not None:
            begun = both.split(NAMES[0])
            following = begun[-1].split(NAMES[1])
            if len(begun) != 2 or len(following) != 2:
                return None
            between, last = following
        return cls(*(_with_ids(text) for text in (opens, inside, between, last)))

    def pythonic(self) -> PythonicSpelling | None:
        """The spelling of calls that are expressions of Python; None if they are something else."""
        opens, ends = self.opens.strip(), self.last.strip()
        called = re.fullmatch(rf"""\({FIRST}=(['"]){VALUES[FIRST]}\1\)\](.+)""", ends)
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


def tagged_layout(split: SplitSection, first: str, behind: Mapping[str, str]) -> CallLayout | None:
    """The layout of calls with tags.

    Args:
        first: the text between the call's name and the name of its first argument.
        behind: the text from each argument's name to the next one's, or to the end.
    """
    joints = [_around(behind[key], VALUES[key], key) for key in (FIRST, "argb", LAST)]
    first_joint, second_joint, last_joint = joints
    if first_joint is None or first_joint != second_joint or last_joint is None:
        return None
    text_middle, joint = first_joint
    # What stands before the first argument's name and before others' alike is the tag that opens it.
    before, between = segments(first), segments(joint)
    shared = common_length(before[::-1], between[::-1])
    opens, closes = "".join(before[len(before) - shared :]), "".join(between[: len(between) - shared])
    if not (opens.strip() and closes.strip() and text_middle and last_joint[1].startswith(closes)):
        return None
    middle = "".join(before[: len(before) - shared])
    call_closes, call_between = last_joint[1].removeprefix(closes), ""
    if split.between:
        to_next = _around(split.between, VALUES[FIRST], FIRST)
        to_end = _around(split.last, VALUES[FIRST], FIRST)
        if to_next is None or to_end is None or not to_next[1].startswith(closes):
            return None
        call_between, call_closes = to_next[1].removeprefix(closes), to_end[1].removeprefix(closes)
        middle = _with_indices(middle, to_end[0].partition(FIRST)[0].removesuffix(opens))[0]
    call_opens, call_between = _with_indices_at_end(split.opens, call_between)
    middles, words = _other_values(behind, joint, text_middle)
    tags = TaggedArguments(opens, middles, closes, words)
    tags = replace(tags, item=_item_of(behind, joint, tags))
    return _sectioned(call_opens.lstrip(), middle, call_closes, call_between, tags)


def _other_values(
    behind: Mapping[str, str], joint: str, text_middle: str
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """The text before values by their types, and the words that are not written as in JSON."""
    middles = {TEXT_TYPE: text_middle}
    words: list[tuple[str, str]] = []
    for key, kind in TYPES.items():
        text, value = behind.get(key, "").replace(key, KEY), json.dumps(VALUES[key])
        written = next((w for w in (value, str(VALUES[key])) if text.endswith(w + joint)), None)
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


def _item_of(behind: Mapping[str, str], joint: str, tags: TaggedArguments) -> str:
    """The name of the tags around a list's items; empty if lists and objects are not tags within tags."""
    text = behind.get("argg", "").replace("argg", KEY).removesuffix(joint)
    named = re.match(re.escape(tags.middle("") + tags.opens) + r"(\w+)", text)
    if named is None:
        return ""
    nested = replace(tags, item=named[1])
    shown = [(text, "argg"), (behind.get("argh", "").replace("argh", KEY).removesuffix(joint), "argh")]
    alike = all(seen == tags.middle("") + nested.spelled(VALUES[key]) for seen, key in shown)
    return nested.item if alike and not tags.types_show else ""


def _around(text: str, value: str, key: str) -> tuple[str, str] | None:
    """The text before and behind a value, with a slot for its argument's name; None if it is not there."""
    before, found, behind = text.partition(value)
    return (before, behind.replace(key, KEY)) if found else None


def parts_around(text: str, names: Sequence[str]) -> list[str] | None:
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
    for found in itertools.islice(re.finditer(r"\{", text), _MAX_OBJECTS):
        try:
            value, end = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        if value == ONE_VALUE:
            return text[: found.start()], text[end:]
    return None


def _with_ids(text: str) -> str:
    for call_id in IDS:
        text = text.replace(call_id, ID)
    return text


def _with_indices(one: str, other: str) -> tuple[str, str]:
    """Two texts of the first and second call, with a slot where they differ in a number."""
    a, b = segments(one), segments(other)
    if len(a) != len(b):
        return one, other
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y and x.isdigit() and y.isdigit():
            a[n] = b[n] = INDEX
    return "".join(a), "".join(b)


def _with_indices_at_end(one: str, other: str) -> tuple[str, str]:
    """Two texts that end alike, with a slot where they differ in a number."""
    a, b = segments(one), segments(other)
    for n in range(1, min(len(a), len(b)) + 1):
        if a[-n] != b[-n]:
            if not (a[-n].isdigit() and b[-n].isdigit()):
                break
            a[-n] = b[-n] = INDEX
    return "".join(a), "".join(b)


def _with_optional_ids(text: str) -> str:
    """The text in which an id may be left out, since models do not always write one."""
    for found in (_JSON_ID, _MARKED_ID):
        text = found.sub(lambda m: f"{OPTIONAL_OPENS}{m[0]}{OPTIONAL_CLOSES}", text)
    return text


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
