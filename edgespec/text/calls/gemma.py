"""Calls as Gemma 4 writes them: names without quotes, texts between marks of their own.

    <|tool_call>call:NAME{city:<|"|>Oslo<|"|>,days:3,hourly:false,units:[<|"|>C<|"|>]}<tool_call|>

The schema of a tool's arguments is turned into a grammar (in llguidance's dialect of Lark), and what was
written is read back into JSON. Arguments come in alphabetical order, as the chat template shows them.
`allOf`, `not`, `prefixItems` and `patternProperties` are not enforced below the arguments themselves.

Source: https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import UsageError
from edgespec.generation.tools import Tool
from edgespec.text.calls.argument_values import LONGEST_NAME, SchemaReader, is_json, text_pattern
from edgespec.text.calls.reader import CallEnd, CallName, CallReader

TRIGGER, ENDS, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESULTS = "tool_responses"  # what templates call the results in the message of the calls
_CALL = "call:"
_LETTER = r'[^\s{}\[\]:,<>"]'
_NAME = re.compile(f"{_LETTER}{{1,{LONGEST_NAME}}}")
_ANY_NAME = f"/{_LETTER}{{1,64}}/"
_LITERALS = {"boolean": ("true", "false"), "null": ("null",)}


@dataclass(frozen=True)
class BraceSpelling:
    """Spells calls like this; see `syntax.CallSpelling`."""

    marks = (ENDS, QUOTE)
    goes_on = False
    quotes = ""

    def grammar(self, tools: Sequence[Tool], controls: Mapping[str, int], *, several: bool) -> str:
        """See `syntax.CallSpelling`; each call has a trigger of its own."""
        lines: list[str] = []
        calls = []
        for tool in tools:
            calls.append(f"{json.dumps(f'{_CALL}{tool.name}{{')} {_Rules(tool, lines).arguments()}")
        ways = " | ".join(calls)
        return "\n".join([f"start: ({ways}) {json.dumps(f'}}{ENDS}')}", *lines])

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Returns what reads a call behind the trigger."""
        return _BraceCallReader()

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "".join(f"{TRIGGER}{_CALL}{name}{spelled(values)}{ENDS}" for name, values in calls)


BRACES = BraceSpelling()


def spelled(value: Any) -> str:
    """A JSON value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{spelled(value[name])}" for name in _sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(spelled(item) for item in value) + "]"
    return json.dumps(value)


def with_results_in_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Put each result into the message that called, as early templates want it."""
    found: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        if message.get("role") == "tool" and found and found[-1].get("tool_calls"):
            name = message.get("name") or names.get(str(message.get("tool_call_id"))) or "unknown"
            results = [*found[-1].get(RESULTS, ()), {"name": name, "response": message["content"]}]
            found[-1] = {**found[-1], RESULTS: results}
            continue
        calls = message.get("tool_calls") or ()
        names |= {str(call["id"]): call["function"]["name"] for call in calls if call.get("id")}
        found.append(message)
    return found


class _Rules:
    """Writes the rules for one tool's arguments.

    Args:
        lines: of the grammar, to which the rules are added.
    """

    def __init__(self, tool: Tool, lines: list[str]) -> None:
        self._tool = tool
        self._lines = lines
        self._schemas = SchemaReader(tool)
        self._named: dict[int, str] = {}  # rules, by the identity of their schemas
        self._open: list[tuple[str, Any]] = []  # rules that are named and not written yet
        self._any = ""

    def arguments(self) -> str:
        schemas = self._schemas
        further = self._value({}) if schemas.takes_any else ""
        members = self._members(schemas.listed, schemas.required, further)
        while self._open:
            rule, schema = self._open.pop()
            ways = [written for way in schemas.ways(schema) for written in self._ways(way)]
            self._lines.append(f"{rule}: {' | '.join(ways)}")
        return members

    def _members(
        self, properties: Mapping[str, Any], required: Collection[str], further: str = "", least: int = 0
    ) -> str:
        """A rule for the members of an object.

        Args:
            further: the rule of values with other names; empty permits none.
            least: the number of members with other names that must come.
        """
        names = _sorted(properties)
        for name in names:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"An argument of the tool {self._tool.name} is named {name[:LONGEST_NAME]!r}.",
                    "This model cannot write long names, spaces, quotes, brackets, ':' and ',' in them.",
                )
        later, first = self._others(names, further, least)
        required = set(required)
        for name in reversed(names):
            pair = f"{json.dumps(f'{name}:')} {self._value(properties[name])}"
            behind, only = f'"," {pair} {later}', f"{pair} {later}"
            if name not in required:
                behind, only = f"{behind} | {later}", f"{only} | {first}"
            later, first = self._rule(behind), self._rule(only)
        return first

    def _others(self, names: Sequence[str], further: str, least: int) -> tuple[str, str]:
        """Rules for members with other names: behind a member, and as the first ones."""
        if not further:
            nothing = self._rule('""')
            return nothing, nothing
        name = self._terminal(_ANY_NAME, [re.escape(other) for other in names])
        pair = f'{name} ":" {further}'
        behind = self._rule(f'("," {pair})*')
        first = f"{pair} {behind}"
        return behind, self._rule(first if least else f'{first} | ""')

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self._anything()
        if id(schema) not in self._named:
            self._named[id(schema)] = rule = self._new()
            self._open.append((rule, schema))
        return self._named[id(schema)]

    def _ways(self, schema: Mapping[str, Any]) -> list[str]:
        """The ways to write a value that fits a schema without references and alternatives."""
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and listed:
            return [json.dumps(spelled(item)) for item in listed]
        kinds = schema.get("type")
        if kinds is None:
            kinds = "object" if "properties" in schema else "array" if "items" in schema else []
        several = kinds if isinstance(kinds, list) else [kinds]
        return [self._of_kind(str(kind), schema) for kind in several] or [self._anything()]

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._text(text_pattern(schema))
        if kind in _LITERALS:
            return " | ".join(map(json.dumps, _LITERALS[kind]))
        if kind == "array":
            return self._list(schema)
        if kind == "object":
            return self._object(schema)
        # A scalar is JSON, or the grammar engine says what is wrong with its schema.
        return self._schemas.json_rule({**schema, "type": kind})

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", {}))
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        upper = "" if most is None else str(int(most) - 1)
        more = f'("," {item}){{{max(least - 1, 0)},{upper}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", not properties)
        further = "" if others is False else self._value({} if others is True else others)
        members = self._members(
            properties, schema.get("required", []), further, int(schema.get("minProperties", 0))
        )
        return f'"{{" {members} "}}"'

    def _anything(self) -> str:
        if not self._any:
            self._any = rule = self._new()
            pair = f'{self._terminal(_ANY_NAME)} ":" {rule}'
            ways = [
                self._text("(?s:.*)"),
                self._schemas.json_rule({"type": "number"}),
                '"true"',
                '"false"',
                '"null"',
            ]
            ways += [f'"[" ({rule} ("," {rule})*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"']
            self._lines.append(f"{rule}: {' | '.join(ways)}")
        return self._any

    def _text(self, pattern: str) -> str:
        """A terminal for a text between quotes, which cannot contain one."""
        quote = re.escape(QUOTE)
        return self._terminal(f"/{quote}{pattern}{quote}/", [f"{quote}(?s:.*){quote}(?s:.+)"])

    def _terminal(self, pattern: str, but: Sequence[str] = ()) -> str:
        name = self._new().upper()
        excluded = f" & ~/(?:{'|'.join(but)})/" if but else ""
        self._lines.append(f"{name}: {pattern}{excluded}")
        return name

    def _rule(self, text: str) -> str:
        name = self._new()
        self._lines.append(f"{name}: {text}")
        return name

    def _new(self) -> str:
        self._lines.append("")  # its number is taken
        return f"r{len(self._lines)}"


class _BraceCallReader:
    """Reads a call; see `reader.CallReader`. Texts are passed on as they come."""

    _HEAD = re.compile(rf"\s*{_CALL}\s*([\w.-]+)\s*(?=\{{)")
    _KEY = re.compile(
        rf'{re.escape(QUOTE)}(.*?){re.escape(QUOTE)}\s*:|"([^"]*)"\s*:|([^\s:{{}}\[\],]+)\s*:', re.DOTALL
    )
    _IN_JSON_TEXT = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
    _SCALAR = re.compile(r"[^\s,\]}]+(?=[\s,\]}])")

    def __init__(self) -> None:
        self._named = self._over = False
        self._quote = ""  # what the text that is being read ends with
        self._open: list[str] = []  # brackets
        self._complete = False  # a value was read; a comma follows, or the end of its bracket
        self._awaits_value = False  # behind the name of a member

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        if not self._named:
            head = self._HEAD.match(text)
            if head is None:
                return "", text
            self._named = True
            return CallName(head[1]), text[head.end() :]
        said = ""
        while not self._over and text:
            piece, rest = self._next(text)
            if not piece and rest == text:
                break
            said, text = said + piece, rest
        if said or not self._over:
            return said, text
        at = text.find(ENDS)
        return ("", text) if at < 0 else (CallEnd(), text[at + len(ENDS) :])

    def _next(self, text: str) -> tuple[str, str]:
        """The JSON of what comes first, and the rest; the text as it is if more of it is needed."""
        if self._quote:
            return self._in_text(text) if self._quote == QUOTE else self._in_json_text(text)
        begun = text.lstrip()
        if not begun:
            return "", text
        first = begun[0]
        if first in "]}" and self._open:
            self._open.pop()
            self._complete, self._over = True, not self._open
            return first, begun[1:]
        if self._complete:
            self._complete = False
            return (", ", begun[1:]) if first == "," else ("", begun)
        if self._open and self._open[-1] == "{" and not self._awaits_value:
            return self._name(text, begun)
        return self._value(text, begun)

    def _name(self, text: str, begun: str) -> tuple[str, str]:
        key = self._KEY.match(begun)
        if key is None:
            return "", text
        self._awaits_value = True
        name = next(group for group in key.groups() if group is not None)
        return f"{json.dumps(name)}: ", begun[key.end() :]

    def _value(self, text: str, begun: str) -> tuple[str, str]:
        if begun[0] in "[{":
            self._open.append(begun[0])
            self._awaits_value = False
            return begun[0], begun[1:]
        for quote in (QUOTE, '"'):
            if begun.startswith(quote):
                self._quote = quote
                return '"', begun[len(quote) :]
        if QUOTE.startswith(begun):
            return "", text
        found = self._SCALAR.match(begun)
        if found is None:
            return "", text
        self._awaits_value, self._complete = False, True
        return _as_json(found[0]), begun[found.end() :]

    def _in_text(self, text: str) -> tuple[str, str]:
        at = text.find(QUOTE)
        if at >= 0:
            self._end_text()
            return f'{_inner(text[:at])}"', text[at + len(QUOTE) :]
        sizes = range(min(len(QUOTE) - 1, len(text)), 0, -1)
        end = len(text) - next((n for n in sizes if QUOTE.startswith(text[-n:])), 0)
        return _inner(text[:end]), text[end:]

    def _in_json_text(self, text: str) -> tuple[str, str]:
        found = self._IN_JSON_TEXT.match(text)
        end = found.end() if found is not None else 0
        if text[end : end + 1] != '"':
            return text[:end], text[end:]
        self._end_text()
        return text[: end + 1], text[end + 1 :]

    def _end_text(self) -> None:
        self._quote, self._awaits_value, self._complete = "", False, True


def _as_json(text: str) -> str:
    """A scalar as JSON: as it is if it is one, and else as a text."""
    return text if is_json(text) else json.dumps(text)


def _inner(text: str) -> str:
    """A part of a text as JSON has it between its quotes."""
    return json.dumps(text)[1:-1]


def _sorted(names: Mapping[str, Any]) -> list[str]:
    """Names in the order of the template: alphabetical, whatever their case."""
    return sorted(names, key=str.lower)
