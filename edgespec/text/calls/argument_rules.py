"""The grammar of arguments that stand between tags, from their schemas (`tagged` reads them).

In llguidance's dialect of Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import UsageError
from edgespec.text.calls.argument_values import (
    ANY_NAME,
    LONGEST_NAME,
    ArgumentValue,
    SchemaReader,
    type_name,
)
from edgespec.text.calls.layout import (
    KEY,
    SLOTS,
    TEXT_TYPE,
    TaggedArguments,
    common_length,
    rule,
)

_CLOSING = re.compile(r"(\s*)(\S+)(.*)", re.DOTALL)
_NAMED = f"/{ANY_NAME}/"
_INSIDE = "_in"  # in the names of rules of what is within a value
_DEEPEST = 5  # beyond, a value is any


@dataclass(frozen=True)
class ArgumentRules:
    """Writes the rules of an argument."""

    tags: TaggedArguments
    controls: Mapping[str, int]  # the tokens of marks that are control tokens
    schemas: SchemaReader  # reads the schema of the tool
    name: str  # of the rule of the argument; other rules have it as their prefix

    def rules(self, key: str, value: ArgumentValue) -> list[str]:
        """The rule of the argument, and those that it uses.

        Args:
            key: the name of the argument; empty for any name.

        Raises:
            UsageError: the name, or one within the value, cannot be written.
        """
        self.schemas.steps.take()
        _check_key(key)
        space, tag, rest = closing_of(self.tags.closes.replace(KEY, key))
        closing = " ".join(filter(None, [_optional(space), rule(tag, self.controls)]))
        ways = [
            f"{self._middle(type_name(item))} {json.dumps(written)} {closing}"
            for word, item in value.words.items()
            for written in self._written(word, item)
        ]
        lines: list[str] = []
        for form in value.forms:
            for kind in _types_of(form):
                if self.tags.item and kind in ("array", "object"):
                    inner, more = self._nested(kind, form, len(lines))
                    ways.append(f"{self._middle(kind)} {inner} {closing}")
                    lines += more
                    continue
                written = self.schemas.json_rule({**form, "type": kind} if kind else form)
                ways.append(f"{self._middle(kind)} {written} {closing}")
                ways += [
                    f"{self._middle(kind)} {json.dumps(written)} {closing}"
                    for word, written in self.tags.words
                    if kind == type_name(json.loads(word))
                ]
        anything = self.tags.item and value.types and not value.forms and not value.words
        for n, text in enumerate(value.texts):
            if anything:
                inner, more = self._any()
                way = f"{inner} {rule(key + self._borders[2], self.controls)}"
            else:
                way, line = self._text(f"{self.name}_text_{n}".upper(), text, space, tag)
                more = [line]
            ways.append(f"{self._middle(TEXT_TYPE)} {way}")
            lines += more
        opens, behind = rule(self.tags.opens + key, self.controls), rule(rest, self.controls)
        named = "" if key else _NAMED
        return [
            f"{self.name}: {opens} {named} {self.name}_value {behind}",
            f"{self.name}_value: {' | '.join(ways)}",
            *lines,
        ]

    def _middle(self, kind: str) -> str:
        """The text before a value; the white space at its end may be left out, and nothing may be added."""
        text = self.tags.middle(kind)
        bare = text.rstrip()
        return " ".join(filter(None, [rule(bare, self.controls), _optional(text[len(bare) :])]))

    def _written(self, word: str, item: Any) -> list[str]:
        """The ways to write a word: as in JSON, and as the template writes it."""
        if isinstance(item, str):
            return [word]
        return [word, *(written for json_word, written in self.tags.words if json_word == word)]

    def _text(self, terminal: str, text: str, space: str, tag: str) -> tuple[str, str]:
        """The rule for a text that matches a regular expression, and its terminal."""
        optional = f"(?:{_escaped(space)})?" if space else ""
        if any(tag.startswith(mark) for mark in self.controls):  # which no text can hold
            return f"{terminal} {rule(tag, self.controls)}", f"{terminal}: /{text}{optional}/"
        closes = _escaped(tag)
        # A text ends with the first tag, so it cannot contain one.
        return terminal, rf"{terminal}: /{text}{optional}{closes}/ & ~/(?s:.*){closes}(?s:.+)/"

    def _nested(self, kind: str, form: Mapping[str, Any], number: int) -> tuple[str, list[str]]:
        """The rule of a list or an object ("array" or "object") as tags within tags, and its lines.

        Args:
            form: its schema.
            number: tells it from other values of the argument.
        """
        name = f"{self.name}{_INSIDE}{number}"
        known = name.count(_INSIDE) <= _DEEPEST
        body, lines = (self._list if kind == "array" else self._object)(name, form if known else {})
        return name, [f"{name}: {body}", *lines]

    def _list(self, name: str, form: Mapping[str, Any]) -> tuple[str, list[str]]:
        inner = replace(self, name=f"{name}_item")
        least, most = form.get("minItems", 0), form.get("maxItems", "")
        bounds = f"{{{least},{most}}}" if least or most != "" else "*"
        return f"{inner.name}{bounds}", inner.rules(self.tags.item, self.schemas.value(form.get("items")))

    def _object(self, name: str, form: Mapping[str, Any]) -> tuple[str, list[str]]:
        parts: list[str] = []
        lines: list[str] = []
        listed, required = self.schemas.properties(form), form.get("required") or ()
        for n, (key, schema) in enumerate(listed.items()):
            inner = replace(self, name=f"{name}_{n}")
            lines += inner.rules(key, self.schemas.value(schema))
            parts.append(inner.name if key in required else f"{inner.name}?")
        if form.get("additionalProperties", not listed) is not False:
            other = replace(self, name=f"{name}_other")
            anything, more = other._any()
            lines += [*more, f"{other.name}: {self._any_element(self.tags.opens, anything)}"]
            parts.append(f"{other.name}*")
        return " ".join(parts) or '""', lines

    def _any(self) -> tuple[str, list[str]]:
        """The rule of a text or elements up to the name in the closing tag, and its lines."""
        name = f"{self.name}_any"
        begin, slash, _ = self._borders
        text, line = self._text(f"{name}_text".upper(), "(?s:.*)", "", begin)
        element = self._any_element(self.tags.opens.removeprefix(begin), name)
        return name, [
            f"{name}: {text} {name}_element* {rule(slash, self.controls)}",
            f"{name}_element: {element} {rule(begin, self.controls)}",
            line,
        ]

    def _any_element(self, opens: str, content: str) -> str:
        """An element of any name, with a rule that `_any` has made as its content."""
        before, middle = rule(opens, self.controls), rule(self.tags.middle(""), self.controls)
        behind = rule(self._borders[2], self.controls)
        return " ".join(filter(None, [before, _NAMED, middle, content, _NAMED, behind]))

    @property
    def _borders(self) -> tuple[str, str, str]:
        """The beginning of all tags, and the text before and behind the name in closing ones."""
        before, _, behind = self.tags.closes.partition(KEY)
        begin = before[: common_length(self.tags.opens, before)]
        return begin, before.removeprefix(begin), behind


def _check_key(key: str) -> None:
    if re.search(rf"[<>\n{SLOTS}]", key) or len(key) > LONGEST_NAME:
        raise UsageError(
            f"An argument is named {key[:LONGEST_NAME]!r}.",
            "This model cannot write '<', '>', line breaks and long names of arguments.",
        )


def closing_of(closes: str) -> tuple[str, str, str]:
    """The white space before a closing tag, the tag up to the next white space, and what follows it."""
    found = _CLOSING.fullmatch(closes)
    assert found is not None, "a tag has a text"
    return found[1], found[2], found[3]


def _optional(space: str) -> str:
    """White space in a grammar that may be left out."""
    return f"/(?:{_escaped(space)})?/" if space else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _types_of(form: Mapping[str, Any]) -> list[str]:
    """JSON's types of what fits a schema; [""] if it does not say."""
    kinds = form.get("type", "")
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else [str(kinds)]
