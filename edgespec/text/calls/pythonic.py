"""Calls as expressions of Python, as LFM2 and some Llama models write them.

    <|tool_call_start|>[get_weather(city="Oslo", days=3), get_time(zone='CET')]<|tool_call_end|>

Texts may stand in either kind of quotes; the words are True, False and None.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import UsageError
from edgespec.generation.tools import Tool
from edgespec.text.calls.argument_values import LONGEST_NAME, SchemaReader, is_json
from edgespec.text.calls.layout import SPACE, SPACE_RULE
from edgespec.text.calls.reader import CallEnd, CallName, CallReader

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BOUNDS = {"pattern", "format", "minLength", "maxLength"}
_DESCRIBING = {"not", "title", "description", "default", "examples"}


@dataclass(frozen=True)
class PythonicSpelling:
    """Spells calls like this; see `syntax.CallSpelling`."""

    goes_on = False
    quotes = "\"'"

    opens: str
    ends: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""
        return (self.ends,)

    def grammar(self, tools: Sequence[Tool], controls: Mapping[str, int], *, several: bool) -> str:
        lines = [SPACE_RULE]
        for n, tool in enumerate(tools):
            lines += _call_rules(f"call_{n}", tool)
        lines.append(f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}")
        ends = f"<[{controls[self.ends]}]>" if self.ends in controls else json.dumps(self.ends)
        more = f'("," {SPACE} call)*' if several else ""
        return "\n".join([f'start: {SPACE} "[" {SPACE} call {more} {SPACE} "]" {SPACE} {ends}', *lines])

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return _PythonicReader(self.ends)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        texts = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
            for name, values in calls
        ]
        return f"{self.opens}[{', '.join(texts)}]{self.ends}"


def _call_rules(name: str, tool: Tool) -> list[str]:
    """The rule of a call, and those that it uses: arguments in the listed order, optional ones left out."""
    schemas = SchemaReader(tool)
    rules, required = list[str](), set(schemas.required)
    if schemas.takes_any:
        argument = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {_value({}, schemas)}"
        return [f'{name}: {json.dumps(f"{tool.name}(")} ({argument} ("," {SPACE} {argument})*)? ")"']
    later, first = '""', '""'
    for n, (key, schema) in reversed(list(enumerate(schemas.listed.items()))):
        if not _NAME.fullmatch(key) or len(key) > LONGEST_NAME:
            raise UsageError(
                f"An argument of the tool {tool.name} is named {key[:LONGEST_NAME]!r}.",
                "This model writes arguments as Python does: letters, digits and '_' only.",
            )
        rules += [f"{name}_{n}: {json.dumps(f'{key}=')} {_value(schema, schemas)}"]
        behind, only = f'"," {SPACE} {name}_{n} {later}', f"{name}_{n} {later}"
        if key not in required:
            behind, only = f"{behind} | {later}", f"{only} | {first}"
        rules += [f"{name}_{n}_behind: {behind}", f"{name}_{n}_first: {only}"]
        later, first = f"{name}_{n}_behind", f"{name}_{n}_first"
    return [f'{name}: {json.dumps(f"{tool.name}(")} {first} ")"', *rules]


def _value(schema: Any, schemas: SchemaReader) -> str:
    """The grammar of a value: JSON, Python's words, and texts in single quotes."""
    return f"({' | '.join(written for way in schemas.ways(schema) for written in _ways(way, schemas))})"


def _ways(schema: Mapping[str, Any], schemas: SchemaReader) -> list[str]:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return [json.dumps(written) for item in listed for written in {repr(item), json.dumps(item)}]
    given = schema.get("type", [])
    kinds = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else []
    is_free = not schema.keys() - _DESCRIBING
    ways = []
    if (is_free or "string" in kinds) and not _BOUNDS & schema.keys():
        ways.append(r"/'(?:[^'\\\n]|\\.)*'/")
    if is_free or "boolean" in kinds:
        ways += ['"True"', '"False"']
    if is_free or "null" in kinds:
        ways.append('"None"')
    others = [kind for kind in kinds if kind not in ("boolean", "null")]
    if others or not kinds:
        ways.append(schemas.json_rule({**schema, **({"type": others} if others else {})}))
    return ways


# Some templates do not escape quotes, so one ends a text only before what may follow a value.
_BEHIND = re.compile(r"\s*(.)", re.DOTALL)
_MAY_FOLLOW = ",)]}:"


class _PythonicReader:
    """Reads calls; see `reader.CallReader`. A value is passed on when it is complete."""

    _HEAD = re.compile(r"[\s\[,]*([\w.-]+)\s*\(\s*")
    _KEY = re.compile(r"(?:\s*,)?\s*([A-Za-z_]\w*)\s*=\s*")

    def __init__(self, ends: str) -> None:
        self._ends = ends
        self._named = False
        self._had_call = False
        self._count = 0
        self._value: list[str] | None = None  # pieces of the value that is being read
        self._depth, self._quote = 0, ""  # within it

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        if not self._named:
            return self._between(text)
        if self._value is not None:
            return self._in_value(self._value, text)
        if text.lstrip().startswith(")"):
            self._named = False
            return "}" if self._count else "{}", text.lstrip()[1:]
        key = self._KEY.match(text)
        if key is None or key.end() == len(text):
            return "", text
        before = ", " if self._count else "{"
        self._count += 1
        self._value = []
        return f"{before}{json.dumps(key[1])}: ", text[key.end() :]

    def _in_value(self, pieces: list[str], text: str) -> tuple[str, str]:
        at = 0
        while at < len(text):
            character = text[at]
            if self._quote:
                if character == "\\":
                    if at + 1 == len(text):
                        break
                    at += 1
                elif character == self._quote:
                    behind = _BEHIND.match(text, at + 1)
                    if behind is None:
                        break  # what follows decides
                    if behind[1] in _MAY_FOLLOW:
                        self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in "[{(":
                self._depth += 1
            elif character in ")]}" or character == ",":
                if not self._depth:
                    self._value = None
                    return _as_json("".join([*pieces, text[:at]]).strip()), text[at:]
                self._depth -= character != ","
            at += 1
        pieces.append(text[:at])
        return "", text[at:]

    def _between(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        head = self._HEAD.match(text)
        if head is not None:
            self._named = self._had_call = True
            self._count = 0
            return CallName(head[1]), text[head.end() :]
        at = text.find(self._ends)
        if self._had_call and at >= 0:
            return CallEnd(), text[at + len(self._ends) :]
        return "", text


def _as_json(text: str) -> str:
    """A value in JSON's or Python's form as JSON; as a text if it is neither."""
    if is_json(text):
        return text
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text[1:-1] if text[:1] in "'\"" else text, ensure_ascii=False)
