"""The values of a tool's arguments, by its schema: a text as it is, one of several words, or JSON.

For spellings of calls that put each argument between tags of its own; see `calls.tagged`.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.generation.tools import Tool, json_value
from edgespec.text.calls.layout import JSON_SPACE
from edgespec.text.grammar.digits import MAX_DIGITS
from edgespec.text.grammar.schemas import Steps

_CHARACTERS_A_STEP = 64  # of schemas that are written into a grammar
_ABOUT_TEXTS = ("minLength", "maxLength", "pattern", "format")
_PLAIN = {"not", "type", "title", "description", "default", "examples"}
_TYPES = {
    **{"null": type(None), "boolean": bool, "array": list, "object": dict},
    **{"string": str, "integer": int, "number": float},
}
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,8}",
    "ipv4": r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}",
}
_INTEGER = f"-?(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_NUMBERS = {
    "integer": f"/{_INTEGER}/",
    "number": rf"/{_INTEGER}(\.[0-9]{{1,{MAX_DIGITS}}})?([eE][+-]?[0-9]{{1,{MAX_DIGITS}}})?/",
}
ANYTHING_BUT_TEXT = frozenset(_TYPES) - {"string"}
ANY_NAME = "[A-Za-z0-9_.-]{1,64}"
"""The regular expression of the names of arguments that no schema lists."""
LONGEST_NAME = 256
"""Characters in the name of an argument that a schema lists."""


@dataclass(frozen=True)
class ArgumentValue:
    """The values that an argument may have."""

    words: Mapping[str, Any]  # values that are written as they are, by what they are written as
    texts: tuple[str, ...] = ()  # regular expressions of texts
    forms: tuple[dict[str, Any], ...] = ()  # schemas of values that are written as JSON
    # JSON's types of what is to be read as JSON although it might be a text
    types: frozenset[str] = frozenset()

    def read(self, text: str) -> str:
        """The JSON of a value that was written as this text."""
        if text in self.words:
            return json.dumps(self.words[text])
        if not is_json(text) or (self.texts and not types_of(json.loads(text)) & self.types):
            return json.dumps(text)
        return text.strip()

    @property
    def is_text(self) -> bool:
        """True if it is a text, whatever it looks like."""
        return not self.words and not self.forms and not self.types


ANY_VALUE = ArgumentValue({}, ("(?s:.*)",), types=ANYTHING_BUT_TEXT)
"""A value of any type."""


class SchemaReader:
    """Reads a tool's schema, which `schemas.normalized` has returned, within a budget of steps.

    Attributes:
        schema: of the tool's arguments.
        steps: the budget; its GrammarError is raised by every method.
    """

    def __init__(self, tool: Tool) -> None:
        self.schema = tool.schema
        self.steps = Steps(len(tool.parameters))
        definitions = self.schema.get("$defs")
        self._definitions: Mapping[str, Any] = definitions if isinstance(definitions, Mapping) else {}
        # By the identity of a schema, which is kept too, so that no other one has it.
        self._values: dict[int, tuple[Any, ArgumentValue]] = {}
        self._properties: dict[int, tuple[Any, dict[str, Any]]] = {}

    @property
    def required(self) -> list[str]:
        """The arguments that a call must have."""
        required = self.schema.get("required")
        return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []

    @property
    def listed(self) -> dict[str, Any]:
        """The schema of each argument that the tool lists, in the order in which they are written."""
        listed = self.properties(self.schema)
        return {name: listed.get(name, {}) for name in (*self.required, *listed)}

    @property
    def takes_any(self) -> bool:
        """True if arguments may have any name: none is listed, nor does the schema rule them out."""
        open_to_others = self.schema.get("additionalProperties") is not False
        return open_to_others and "properties" not in self.schema and not self.listed

    def ways(self, schema: Any) -> list[Mapping[str, Any]]:
        """The schemas without references and alternatives that together permit what a schema does."""
        found: list[Mapping[str, Any]] = []
        waiting = [schema]
        while waiting:
            self.steps.take()
            part = waiting.pop()
            options = self._options(part, "anyOf", "oneOf")
            if options:
                waiting += reversed(options[0])
            else:
                found.append(part if isinstance(part, Mapping) else {})
        return found

    def properties(self, schema: Any) -> dict[str, Any]:
        """The properties that a schema names, itself, by reference, or in alternatives."""
        known = self._properties.get(id(schema))
        if known is not None:
            return known[1]
        found: dict[str, Any] = {}
        waiting, seen = [schema], set()
        while waiting:
            part = waiting.pop()
            if id(part) in seen or not isinstance(part, Mapping):
                continue
            seen.add(id(part))
            self.steps.take()
            listed = part.get("properties")
            for name, value in listed.items() if isinstance(listed, Mapping) else ():
                self.steps.take()
                found.setdefault(name, value)
            waiting += reversed([*itertools.chain(*self._options(part, "allOf", "anyOf", "oneOf"))])
        self._properties[id(schema)] = schema, found
        return found

    def value(self, schema: Any) -> ArgumentValue:
        """The values that fit a schema."""
        known = self._values.get(id(schema))
        if known is None:
            known = schema, _joined([_value(way) for way in self.ways(schema)])
            self._values[id(schema)] = known
        return known[1]

    def _options(self, schema: Any, *keys: str) -> list[list[Any]]:
        """The schemas that stand for one: the one that it refers to, and those in its lists."""
        if not isinstance(schema, Mapping):
            return []
        name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
        referred = [self._definitions[name]] if name in self._definitions else []
        lists = [schema[key] for key in keys if isinstance(schema.get(key), list)]
        return [options for options in (referred, *lists) if options]

    def json_rule(self, form: Mapping[str, Any]) -> str:
        """A grammar's term for the JSON of a part of the schema."""
        kind = form.get("type")
        if isinstance(kind, str) and kind in _NUMBERS and not set(form) - _PLAIN:
            return _NUMBERS[kind]
        text = json.dumps(form)
        form = {**form, "$defs": self._definitions} if '"$ref"' in text and self._definitions else form
        text = json.dumps({**form, **JSON_SPACE})
        self.steps.take(len(text) // _CHARACTERS_A_STEP)
        return f"%json {text}"


def _value(schema: Mapping[str, Any]) -> ArgumentValue:
    """The values that fit a schema without references and alternatives."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return ArgumentValue({item if isinstance(item, str) else json.dumps(item): item for item in listed})
    kind = schema.get("type")
    if kind is None and not any(key in schema for key in ("properties", "items", "$ref", "allOf")):
        return ArgumentValue({}, (text_pattern(schema),), types=ANYTHING_BUT_TEXT)
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    others = [name for name in kinds if name != "string"]
    if not others and kinds:
        return ArgumentValue({}, (text_pattern(schema),))
    rest = {key: value for key, value in schema.items() if key not in _ABOUT_TEXTS}
    if others:
        rest["type"] = others if len(others) > 1 else others[0]
    texts = (text_pattern(schema),) if "string" in kinds else ()
    bound = any(key in schema for key in _ABOUT_TEXTS)
    plain = bound or set(schema) <= _PLAIN
    return ArgumentValue({}, texts, (rest,), frozenset(others or _TYPES) if plain else frozenset())


def _joined(values: Sequence[ArgumentValue]) -> ArgumentValue:
    words = {word: item for value in values for word, item in value.words.items()}
    texts = tuple(text for value in values for text in value.texts)
    forms = tuple(form for value in values for form in value.forms)
    return ArgumentValue(words, texts, forms, frozenset().union(*(value.types for value in values)))


def text_pattern(schema: Mapping[str, Any]) -> str:
    """The regular expression of a text; as in JSON schemas, a pattern may match anywhere unless anchored."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
        inner = pattern[start : len(pattern) - end]
        inner = re.sub(r"(?<!\\)/", r"\\/", inner).replace("\n", r"\n")
        return f"{'' if start else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}"
    if schema.get("format") in _FORMATS:
        return f"(?:{_FORMATS[schema['format']]})"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not least and most == "":
        return "(?s:.*)"
    return _bounded(least, most)


def _bounded(least: int, most: int | str) -> str:
    """The regular expression of a text of so many characters; `most` may be empty for any number.

    It neither begins nor ends with a line break: between tags, those count as part of the tags.
    """
    if most != "" and least > int(most):
        return f"(?s:.{{{least},{most}}})"  # which is refused
    ways = [""] if least == 0 else []
    if least <= 1 and most != 0:
        ways.append(r"[^\n]")
    if most == "" or int(most) >= 2:
        inner = f"{max(least - 2, 0)},{'' if most == '' else int(most) - 2}"
        ways.append(rf"[^\n](?s:.{{{inner}}})[^\n]")
    return f"(?:{'|'.join(ways)})"


def read_literal(text: str) -> str | None:
    """The JSON of a literal of Python, such as True or {'a': 1}; None if it is none, or a string."""
    try:
        value = ast.literal_eval(text.strip())
        if isinstance(value, str | bytes):
            return None
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def type_name(value: object) -> str:
    """JSON's name of a value's type; of a whole number, "integer"."""
    return min(types_of(value))


def types_of(value: object) -> set[str]:
    """JSON's names of a value's type: 1 is an integer and a number."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {name for name, kind in _TYPES.items() if kind is type(value)}


def is_json(text: str) -> bool:
    """True if a text is a JSON value whose numbers are finite."""
    try:
        json_value(text)
    except (ValueError, RecursionError):
        return False
    return True
