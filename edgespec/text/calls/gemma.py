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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import UsageError
from edgespec.generation.tools import Tool
from edgespec.text.calls.argument_values import (
    listed_parameters,
    required_of,
    takes_any,
    text_pattern,
)
from edgespec.text.calls.reader import CallEnd, CallName, CallReader

TRIGGER, ENDS, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESULTS = "tool_responses"  # what templates call the results in the message of the calls
_CALL = "call:"
_NAME = re.compile(r'[^\s{}\[\]:,<>"]+')
_SCALARS = ("integer", "number")
_LITERALS = {"boolean": ("true", "false"), "null": ("null",)}


@dataclass(frozen=True)
class BraceSpelling:
    """Spells calls like this; see `syntax.CallSpelling`."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""
        return (ENDS, QUOTE)

    @property
    def goes_on(self) -> bool:
        """See `syntax.CallSpelling`."""
        return False

    def grammar(self, tools: Sequence[Tool], controls: Mapping[str, int], *, several: bool) -> str:
        """See `syntax.CallSpelling`; each call has a trigger of its own."""
        lines: list[str] = []
        calls = []
        for tool in tools:
            rules = _Rules(tool, lines)
            further = rules.value({}) if takes_any(tool) else ""
            members = rules.members(listed_parameters(tool), required_of(tool), further)
            calls.append(f"{json.dumps(f'{_CALL}{tool.name}{{')} {members}")
        ways = " | ".join(calls)
        return "\n".join([f"start: ({ways}) {json.dumps(f'}}{ENDS}')}", *lines])

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Returns what reads a call behind the trigger."""
        return _BraceCallReader()

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """See `syntax.CallSpelling`."""
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
        self._references: dict[str, str] = {}
        self._any = ""

    def members(
        self, properties: Mapping[str, Any], required: Sequence[str], further: str = "", least: int = 0
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
                    f"An argument of the tool {self._tool.name} is named {name!r}.",
                    "This model cannot write spaces, quotes, brackets, ':' and ',' in such names.",
                )
        later, first = self._others(names, further, least)
        for name in reversed(names):
            pair = f"{json.dumps(f'{name}:')} {self.value(properties[name])}"
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
        name = self._terminal(f"/{_NAME.pattern}/", [re.escape(other) for other in names])
        pair = f'{name} ":" {further}'
        behind = self._rule(f'("," {pair})*')
        first = f"{pair} {behind}"
        return behind, self._rule(first if least else f'{first} | ""')

    def value(self, schema: Any) -> str:
        """The rule of a value that fits a schema."""
        if not isinstance(schema, Mapping) or not schema:
            return self._anything()
        reference = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(schema.get("$ref", "")))
        if reference:
            return self._reference(reference[0], self._tool.schema.get(reference[1], {}).get(reference[2]))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._rule(" | ".join(self.value(option) for option in schema[key]))
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and listed:
            return self._rule(" | ".join(json.dumps(spelled(item)) for item in listed))
        kinds = schema.get("type")
        if kinds is None and "properties" in schema:
            kinds = "object"
        if kinds is None and "items" in schema:
            kinds = "array"
        if kinds is None:
            return self._anything()
        several = kinds if isinstance(kinds, list) else [kinds]
        return self._rule(" | ".join(self._of_kind(str(kind), schema) for kind in several))

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
        keep = {key: value for key, value in schema.items() if key not in ("type", "description", "title")}
        return self._rule(f"%json {json.dumps({**keep, 'type': kind})}")

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self.value(schema.get("items", {}))
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        upper = "" if most is None else str(int(most) - 1)
        more = f'("," {item}){{{max(least - 1, 0)},{upper}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", not properties)
        further = "" if others is False else self.value({} if others is True else others)
        members = self.members(
            properties, schema.get("required", []), further, int(schema.get("minProperties", 0))
        )
        return f'"{{" {members} "}}"'

    def _reference(self, name: str, schema: Any) -> str:
        if name not in self._references:
            self._references[name] = rule = self._new()  # before its own rule, which may refer to it
            self._lines.append(f"{rule}: {self.value(schema)}")
        return self._references[name]

    def _anything(self) -> str:
        if not self._any:
            self._any = rule = self._new()
            pair = f'{self._terminal(f"/{_NAME.pattern}/")} ":" {rule}'
            ways = [self._text("(?s:.*)"), '%json {"type": "number"}', '"true"', '"false"', '"null"']
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
    _JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
    _SCALAR = re.compile(r"[^\s,\]}]+(?=[\s,\]}])")

    def __init__(self) -> None:
        self._named = self._over = self._quoted = False
        self._open: list[str] = []  # brackets
        self._complete = False  # a value was read; a comma follows, or the end of its bracket
        self._awaits_value = False  # behind the name of a member

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        """See `CallReader`."""
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
        if self._quoted:
            return self._in_text(text)
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
        if begun.startswith(QUOTE):
            self._quoted = True
            return '"', begun[len(QUOTE) :]
        if QUOTE.startswith(begun):
            return "", text
        found = (self._JSON_TEXT if begun[0] == '"' else self._SCALAR).match(begun)
        if found is None:
            return "", text
        self._awaits_value, self._complete = False, True
        return _as_json(found[0]), begun[found.end() :]

    def _in_text(self, text: str) -> tuple[str, str]:
        at = text.find(QUOTE)
        if at >= 0:
            self._quoted = self._awaits_value = False
            self._complete = True
            return f'{_inner(text[:at])}"', text[at + len(QUOTE) :]
        sizes = range(min(len(QUOTE) - 1, len(text)), 0, -1)
        end = len(text) - next((n for n in sizes if QUOTE.startswith(text[-n:])), 0)
        return _inner(text[:end]), text[end:]


def _as_json(text: str) -> str:
    """A scalar as JSON: as it is if it is one, and else as a text."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text)
    return text


def _inner(text: str) -> str:
    """A part of a text as JSON has it between its quotes."""
    return json.dumps(text)[1:-1]


def _sorted(names: Mapping[str, Any]) -> list[str]:
    """Names in the order of the template: alphabetical, whatever their case."""
    return sorted(names, key=str.lower)
