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
from edgespec.text.calls.argument_values import listed_parameters, required_of, takes_any
from edgespec.text.calls.layout import JSON_SPACE, SPACE, SPACE_RULE
from edgespec.text.calls.reader import CallEnd, CallName, CallReader

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BOUNDS = {"pattern", "format", "minLength", "maxLength"}
_DESCRIBING = {"title", "description", "default", "examples"}
_DEEPEST_REFERENCE = 10
_WORDS = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True)
class PythonicSpelling:
    """Spells calls like this; see `syntax.CallSpelling`."""

    opens: str
    ends: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""
        return (self.ends,)

    @property
    def goes_on(self) -> bool:
        """See `syntax.CallSpelling`."""
        return False

    def grammar(self, tools: Sequence[Tool], controls: Mapping[str, int], *, several: bool) -> str:
        """See `syntax.CallSpelling`."""
        lines = [SPACE_RULE]
        for n, tool in enumerate(tools):
            lines += _call_rules(f"call_{n}", tool)
        lines.append(f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}")
        ends = f"<[{controls[self.ends]}]>" if self.ends in controls else json.dumps(self.ends)
        more = f'("," {SPACE} call)*' if several else ""
        return "\n".join([f'start: {SPACE} "[" {SPACE} call {more} {SPACE} "]" {SPACE} {ends}', *lines])

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """See `syntax.CallSpelling`."""
        return _PythonicReader(self.ends)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """See `syntax.CallSpelling`."""
        texts = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
            for name, values in calls
        ]
        return f"{self.opens}[{', '.join(texts)}]{self.ends}"


def _call_rules(name: str, tool: Tool) -> list[str]:
    """The rule of a call, and those that it uses: arguments in the listed order, optional ones left out."""
    required = required_of(tool)
    rules: list[str] = []
    if takes_any(tool):
        argument = f"/{_NAME.pattern}=/ {_value({}, tool)}"
        return [f'{name}: {json.dumps(f"{tool.name}(")} ({argument} ("," {SPACE} {argument})*)? ")"']
    later, first = '""', '""'
    for n, (key, schema) in reversed(list(enumerate(listed_parameters(tool).items()))):
        if not _NAME.fullmatch(key):
            raise UsageError(
                f"An argument of the tool {tool.name} is named {key!r}.",
                "This model writes arguments as Python does: letters, digits and '_' only.",
            )
        rules += [f"{name}_{n}: {json.dumps(f'{key}=')} {_value(schema, tool)}"]
        behind, only = f'"," {SPACE} {name}_{n} {later}', f"{name}_{n} {later}"
        if key not in required:
            behind, only = f"{behind} | {later}", f"{only} | {first}"
        rules += [f"{name}_{n}_behind: {behind}", f"{name}_{n}_first: {only}"]
        later, first = f"{name}_{n}_behind", f"{name}_{n}_first"
    return [f'{name}: {json.dumps(f"{tool.name}(")} {first} ")"', *rules]


def _value(schema: Any, tool: Tool) -> str:
    """The grammar of a value: JSON, Python's words, and texts in single quotes."""
    return f"({' | '.join(_ways(dict(schema) if isinstance(schema, Mapping) else {}, tool.schema))})"


def _ways(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> list[str]:
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    reference = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(schema.get("$ref", "")))
    if reference and depth < _DEEPEST_REFERENCE:
        return _ways(root.get(reference[1], {}).get(reference[2], {}), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and depth < _DEEPEST_REFERENCE:
            return [way for option in schema[key] for way in _ways(option, root, depth + 1)]
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
        form = {**schema, **definitions, **({"type": others} if others else {}), **JSON_SPACE}
        ways.append(f"%json {json.dumps(form)}")
    return ways


# Some templates do not escape quotes, so one ends a text only before what may follow a value.
_BEHIND_TEXT = re.compile(r"\s*[,)\]}:]")


class _PythonicReader:
    """Reads calls; see `reader.CallReader`. A value is passed on when it is complete."""

    _HEAD = re.compile(r"[\s\[,]*([\w.-]+)\s*\(\s*")
    _KEY = re.compile(r"\s*,?\s*([A-Za-z_]\w*)\s*=\s*")

    def __init__(self, ends: str) -> None:
        self._ends = ends
        self._named = False
        self._had_call = False
        self._count = 0

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        """See `CallReader`."""
        if not self._named:
            return self._between(text)
        if text.lstrip().startswith(")"):
            self._named = False
            return "}" if self._count else "{}", text.lstrip()[1:]
        key = self._KEY.match(text)
        size = _value_size(text, key.end()) if key is not None else 0
        if key is None or not size:
            return "", text
        said = text[key.end() : key.end() + size].rstrip()
        before = ", " if self._count else "{"
        self._count += 1
        return f"{before}{json.dumps(key[1])}: {_as_json(said)}", text[key.end() + size :]

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


def _value_size(text: str, start: int) -> int:
    """The length of the value at `start`, before a comma or bracket; 0 if more of the text is needed."""
    depth, quote, at = 0, "", start
    while at < len(text):
        character = text[at]
        if quote:
            if character == "\\":
                at += 1
            elif character == quote and _BEHIND_TEXT.match(text, at + 1):
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")]}" or character == ",":
            if not depth:
                return at - start
            depth -= character != ","
        at += 1
    return 0


def _as_json(text: str) -> str:
    """A value in JSON's or Python's form as JSON; as a text if it is neither."""
    try:
        json.loads(text)
    except ValueError:
        pass
    else:
        return text
    for word, python in _WORDS.items():
        text = re.sub(rf"(?<![\w'\"]){word}(?![\w'\"])", python, text)
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text[1:-1] if text[:1] in "'\"" else text, ensure_ascii=False)
