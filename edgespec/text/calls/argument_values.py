"""The values of a tool's arguments, by its schema: a text as it is, one of several words, or JSON.

For spellings of calls that put each argument between tags of its own; see `calls.tagged`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.generation.tools import Tool

_DEEPEST_REFERENCE = 10
_ABOUT_TEXTS = ("minLength", "maxLength", "pattern", "format")
_PLAIN = {"type", "title", "description", "default", "examples"}
_TYPES = {
    **{"null": type(None), "boolean": bool, "array": list, "object": dict},
    **{"string": str, "integer": int, "number": float},
}
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,8}",
    "ipv4": r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"
ANYTHING_BUT_TEXT = frozenset(_TYPES) - {"string"}
ANY_NAME = "[A-Za-z0-9_.-]{1,64}"
"""The regular expression of the names of arguments that no schema lists."""


@dataclass(frozen=True)
class ArgumentValue:
    """The values that an argument may have.

    Attributes:
        words: values that are written as they are, by what they are written as.
        texts: regular expressions of texts.
        forms: schemas of values that are written as JSON.
        types: JSON's types of what is to be read as JSON although it might be a text.
    """

    words: Mapping[str, Any]
    texts: tuple[str, ...] = ()
    forms: tuple[dict[str, Any], ...] = ()
    types: frozenset[str] = frozenset()

    def read(self, text: str) -> str:
        """The JSON of a value that was written as this text."""
        if text in self.words:
            return json.dumps(self.words[text])
        if not _is_json(text) or (self.texts and not types_of(json.loads(text)) & self.types):
            return json.dumps(text)
        return text.strip()

    def ends_at_tag(self, text: str) -> bool:
        """True if a value may be over at a tag behind this text; JSON may have a tag in one of its texts."""
        return bool(self.texts) or text in self.words or _is_json(text)

    @property
    def is_text(self) -> bool:
        """True if it is a text, whatever it looks like."""
        return not self.words and not self.forms and not self.types


ANY_VALUE = ArgumentValue({}, ("(?s:.*)",), types=ANYTHING_BUT_TEXT)
"""A value of any type."""


def parameters_of(tool: Tool) -> dict[str, ArgumentValue]:
    """The values that each listed argument of a tool may have, in the order in which they are written."""
    return {name: value_of(value, tool.schema) for name, value in listed_parameters(tool).items()}


def listed_parameters(tool: Tool) -> dict[str, Any]:
    """The schema of each argument that a tool lists, itself, by reference or in alternatives."""
    schema = tool.schema
    listed = properties_of(schema, schema)
    return {name: listed.get(name, {}) for name in (*required_of(tool), *listed)}


def required_of(tool: Tool) -> list[str]:
    """The arguments that a call must have."""
    required = tool.schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def takes_any(tool: Tool) -> bool:
    """True if a tool takes arguments of any name: it lists none, and does not say that there are none."""
    schema = tool.schema
    return (
        not listed_parameters(tool)
        and "properties" not in schema
        and schema.get("additionalProperties") is not False
    )


def properties_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """The properties that a schema names, itself or by reference or alternatives."""
    if not isinstance(schema, dict) or depth > _DEEPEST_REFERENCE:
        return {}
    found = dict(schema["properties"]) if isinstance(schema.get("properties"), dict) else {}
    reference = schema.get("$ref")
    others = [_referred(reference, root)] if isinstance(reference, str) else []
    for key in ("allOf", "anyOf", "oneOf"):
        others += schema[key] if isinstance(schema.get(key), list) else []
    for other in others:
        found = {**properties_of(other, root, depth + 1), **found}
    return found


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def value_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> ArgumentValue:
    """The values that fit a schema, whose references lead into `root`."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if not isinstance(schema, Mapping):
        schema = {}
    reference = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(schema.get("$ref", "")))
    if reference and depth < _DEEPEST_REFERENCE:
        return value_of(root.get(reference[1], {}).get(reference[2], {}), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and depth < _DEEPEST_REFERENCE:
            return _joined([value_of(option, root, depth + 1) for option in schema[key]])
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
    rest = {key: value for key, value in schema.items() if key not in _ABOUT_TEXTS} | definitions
    if others:
        rest["type"] = others if len(others) > 1 else others[0]
    texts = (text_pattern(schema),) if "string" in kinds else ()
    bound = any(key in schema for key in _ABOUT_TEXTS)
    plain = bound or set(schema) <= _PLAIN
    return ArgumentValue({}, texts, (rest,), frozenset(others or _TYPES) if plain else frozenset())


def _joined(values: Sequence[ArgumentValue]) -> ArgumentValue:
    """Join alternatives."""
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
        return None if isinstance(value, str | bytes) else json.dumps(value, ensure_ascii=False)
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


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
