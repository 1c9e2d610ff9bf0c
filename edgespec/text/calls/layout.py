"""Layouts of tool calls in chat templates: literal text around names and arguments, as patterns and grammars.

A layout is learned by rendering (`derivation`) or written down for a family. Its texts hold slots for what
differs from call to call, as characters of Unicode's private use area.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.text.grammar.limits import JSON_OPTIONS

# Slots: the id of a call, its index, an argument's name; and the brackets around text that may be left out.
ID, INDEX, KEY = "\ue000", "\ue001", "\ue002"
OPTIONAL_OPENS, OPTIONAL_CLOSES = "\ue003", "\ue004"
SLOTS = ID + INDEX + KEY + OPTIONAL_OPENS + OPTIONAL_CLOSES

TEXT_TYPE = "string"  # JSON's name

# White space may stand between two of JSON's brackets, quotes, colons and commas.
_JUNCTION = re.compile(r'(?<=[{}\[\],:"])(?=[{}\[\],:"])')
_PIECE = re.compile(rf"[{SLOTS}]|\s+|[^\s{SLOTS}]+")
_PATTERNS = {ID: r"[\w.:-]+", INDEX: r"\d+", OPTIONAL_OPENS: "(?:", OPTIONAL_CLOSES: ")?"}
_RULES = {
    ID: "/[A-Za-z0-9_-]{1,64}/",
    INDEX: "/[0-9]{1,3}/",
    OPTIONAL_OPENS: "(",
    OPTIONAL_CLOSES: ")?",
}

SPACE = "space"
JSON_SPACE = {"x-guidance": JSON_OPTIONS}
SPACE_RULE = rf"{SPACE}: /[ \t\n]{{0,20}}/"


@dataclass(frozen=True)
class TaggedArguments:
    """The tags around arguments that are written one by one."""

    opens: str  # the text before an argument's name
    # the text between name and value by JSON's type of the value; "" stands for any other type
    middles: tuple[tuple[str, str], ...]
    closes: str  # the text behind a value; it may hold KEY
    # how other values are written that JSON writes differently, such as True
    words: tuple[tuple[str, str], ...] = ()
    # the name of a list's items, where lists and objects are tags within tags (`nested`); else empty
    item: str = ""

    def middle(self, kind: str) -> str:
        """The text between a name and a value of that type."""
        found = dict(self.middles)
        return found.get(kind, found[""])

    def spelled(self, value: Any) -> str:
        """A value as the model would write it."""
        if isinstance(value, str):
            return value
        if self.item and isinstance(value, Mapping):
            parts = [(str(key), item) for key, item in value.items() if item is not None]
        elif self.item and isinstance(value, list | tuple):
            parts = [(self.item, item) for item in value]
        else:
            return json.dumps(value, ensure_ascii=False)
        return "".join(
            self.opens + key + self.middle("") + self.spelled(item) + self.closes.replace(KEY, key)
            for key, item in parts
        )

    @property
    def types_show(self) -> bool:
        """True if the text before a value tells texts from other values."""
        return self.middle(TEXT_TYPE) != self.middle("")


@dataclass(frozen=True)
class CallLayout:
    """The text around the names and arguments of calls."""

    opens: str  # before the first name of a section
    middle: str  # between a name and its arguments; for tags, before the first of them
    closes: str  # behind the arguments of the last call
    # behind a call's arguments, before the next name; empty if each call has a section of its own
    between: str = ""
    tags: TaggedArguments | None = None  # None if the arguments are one JSON object

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls (names and arguments) as the model would write them."""
        texts = [name + self.middle + self._arguments(values) for name, values in calls]
        if self.between:
            return _plain(self.opens + self.between.join(texts) + self.closes)
        return _plain("\n".join(self.opens + text + self.closes for text in texts))

    def _arguments(self, values: Mapping[str, Any]) -> str:
        if self.tags is None:
            return json.dumps(values, ensure_ascii=False)
        tags = self.tags
        return "".join(
            tags.opens
            + key
            + tags.middle(TEXT_TYPE if isinstance(value, str) else "")
            + tags.spelled(value)
            + tags.closes.replace(KEY, key)
            for key, value in values.items()
        )


def pattern(text: str) -> str:
    """The regular expression of a layout's text; white space may differ, or be left out."""
    return "".join(_PATTERNS.get(piece) or _literal(piece) for piece in _pieces(text))


def rule(text: str, controls: Mapping[str, int], key: str = "") -> str:
    """A layout's text in a grammar (llguidance's dialect of Lark), with the rule SPACE for white space.

    Args:
        controls: the tokens of marks that are control tokens.
        key: what stands in the slot KEY.
    """
    marks = "|".join(map(re.escape, sorted(controls, key=len, reverse=True)))
    found = []
    for piece in _pieces(text.replace(KEY, key)):
        if piece in _RULES:
            found.append(_RULES[piece])
        elif not piece.strip():
            found.append(SPACE)
        else:
            parts = re.split(f"({marks})", piece) if marks else [piece]
            found += [f"<[{controls[p]}]>" if p in controls else json.dumps(p) for p in parts if p]
    return " ".join(found)


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the letters or segments that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _pieces(text: str) -> Iterator[str]:
    for piece in _PIECE.findall(text):
        if piece in SLOTS or piece.isspace():
            yield piece
            continue
        first, *others = _JUNCTION.split(piece)
        yield first
        for other in others:
            yield " "
            yield other


def _literal(piece: str) -> str:
    return r"\s*" if piece.isspace() else re.escape(piece)


def _plain(text: str) -> str:
    """A text without slots: with the first index and no id."""
    text = re.sub(rf"{OPTIONAL_OPENS}[^{OPTIONAL_CLOSES}]*{OPTIONAL_CLOSES}", "", text)
    return text.replace(INDEX, "0").replace(ID, "call0")
