"""Schemas in the form that grammars are made of. They come from strangers, so the work has a budget.

- References lead to definitions at the root (Zod refers to properties), and are checked.
- Objects have the listed properties only. A schema without `additionalProperties` permits any further names,
  which is meant for validating, not for generating: a model would invent them. Those who want further names
  write `"additionalProperties": true`.
- Patterns that look around are left out, since no automaton can follow them. llguidance ignores other
  keywords that it does not implement, and counts both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from edgespec.errors import GrammarError

MAX_DEPTH = 100  # llguidance reads JSON up to a depth of 128, and wraps a schema before reading it
_LEAST_STEPS, _MAX_STEPS = 2_000, 50_000  # the latter is llguidance's own limit for a schema

_DEFINITIONS = ("$defs", "definitions")
_IN_PLACE = ("anyOf", "oneOf", "allOf")
_OF_SCHEMAS = ("properties", "patternProperties")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS = (*_IN_PLACE, "prefixItems", "items")
_FURTHER_NAMES = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
# These may add properties to those that stand beside them.
_COMPOSING = ("$ref", "$dynamicRef", *_IN_PLACE, "if", "dependentSchemas")
_REPLACED = (*_DEFINITIONS, "$id", "x-guidance")

# Looks around, or back at what it has found; \b and \B look around, too.
_NO_AUTOMATON = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bB]|\\k<)")
_IGNORED = {"not": False}  # permits anything, and counts as a part that is not enforced

# Programs write the range of a machine's integers, for which no automaton can be made.
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_LARGEST_BOUND = 10**16

_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
TIMES = {"time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""Regular expressions of times; llguidance's permit fractions of a second without end."""


class EndlessReference(GrammarError):
    """A reference that leads back to itself, so that no value can be checked against it."""


class Steps:
    """A budget of steps for the work on one schema, so that many small ones cost no more than a large one.

    Args:
        size: characters of the schema.
    """

    def __init__(self, size: int) -> None:
        self._left = min(_LEAST_STEPS + size // 2, _MAX_STEPS)

    def take(self, count: int = 1) -> None:
        """Take steps from the budget.

        Raises:
            GrammarError: it is spent.
        """
        self._left -= count
        if self._left < 0:
            raise GrammarError("The schema has too many parts and references.", "Simplify it.")


def normalized(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose references all are "#/$defs/NAME", where NAME has no special characters.

    Raises:
        EndlessReference: a reference leads back to itself.
        GrammarError: a reference leads nowhere, or the schema is too large or too deep.
    """
    return _Normalizer(schema).result()


class _Normalizer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        text = json.dumps(root)
        self._steps = Steps(len(text))
        # What is composed by allOf may be defined anywhere, and its parts permit each other's properties.
        self._closes = '"allOf"' not in text
        self._names: dict[tuple[str, ...], str] = {}  # of definitions, by the keys that lead to them
        self._references: dict[str, str] = {}  # one to each definition, as it is written
        self._open: list[tuple[str, Any]] = []  # definitions that were not read yet
        self._uses: dict[str, set[str]] = {}  # the definitions that another one has in its place

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = self._part(self._root, "", 0, self._closes)
        definitions = {}
        while self._open:
            name, target = self._open.pop()
            definitions[name] = self._part(target, name, 0, self._closes)
        try:
            TopologicalSorter(self._uses).prepare()
        except CycleError as error:
            name = next(filter(None, error.args[1]))
            raise EndlessReference(
                f"The reference {self._references[name]!r} leads back to itself.",
                "Put it into a property or a list.",
            ) from None
        return {**found, "$defs": definitions} if definitions else found

    def _part(self, schema: Any, place: str | None, depth: int, closes: bool) -> Any:
        """A part of the schema.

        Args:
            place: the definition that it stands for; None if it is about a part of its values.
        """
        self._steps.take()
        if depth > MAX_DEPTH:
            raise GrammarError("The schema is nested too deep.", "Flatten it with $defs and $ref.")
        if not isinstance(schema, Mapping):
            return schema
        composed = "properties" in schema and any(key in schema for key in _COMPOSING)
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _REPLACED:
                continue
            within = place if key in _IN_PLACE else None
            inner = closes and not (composed and key in _LISTS)
            if key == "$ref" and isinstance(value, str):
                found[key] = self._reference(value, place)
            elif key in _OF_SCHEMAS and isinstance(value, Mapping):
                found[key] = {name: self._part(part, None, depth + 1, inner) for name, part in value.items()}
            elif key in _LISTS and isinstance(value, list):
                found[key] = [self._part(part, within, depth + 1, inner) for part in value]
            elif key in _SCHEMAS:
                found[key] = self._part(value, None, depth + 1, inner)
            elif key == "format" and value in list(TIMES) and "pattern" not in schema:
                found["pattern"] = f"^(?:{TIMES[value]})$"
            else:
                found |= _simple(key, value)
        patterns = found.get("patternProperties")
        if isinstance(patterns, Mapping) and any(map(_looks_around, patterns)):
            del found["patternProperties"]
            found.pop("additionalProperties", None)  # which counted for the other names
            found |= _IGNORED
        return _closed(found) if closes and not composed else found

    def _reference(self, reference: str, place: str | None) -> str:
        identifier = self._root.get("$id")
        pointer = reference.removeprefix(identifier) if isinstance(identifier, str) else reference
        keys = tuple(unquote(key).replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:])
        found: Any = self._root if pointer in ("", "#") or pointer.startswith("#/") else None
        for key in keys:
            if isinstance(found, list) and key.isdecimal() and len(key) < 6 and int(key) < len(found):
                found = found[int(key)]
            else:
                found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            raise GrammarError(f"The reference {reference!r} leads nowhere.", "Define what it refers to.")
        name = self._names.get(keys)
        if name is None:
            name = self._names[keys] = f"d{len(self._names)}"
            self._references[name] = reference
            self._open.append((name, found))
        if place is not None:
            self._uses.setdefault(place, set()).add(name)
        return f"#/$defs/{name}"


def _simple(key: str, value: Any) -> dict[str, Any]:
    """A keyword without schemas in it, as it can be enforced."""
    if key == "pattern" and _looks_around(value):
        return _IGNORED
    if key in _BOUNDS and isinstance(value, int | float) and value * _BOUNDS[key] >= _LARGEST_BOUND:
        return {}
    return {key: value}


def _looks_around(pattern: Any) -> bool:
    return isinstance(pattern, str) and _NO_AUTOMATON.search(pattern) is not None


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with the listed properties only, those among them that it must have, unless it says more."""
    if "properties" in schema and not any(key in schema for key in _FURTHER_NAMES):
        schema["additionalProperties"] = False
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        listed, required = schema.get("properties", {}), schema.get("required")
        if isinstance(listed, Mapping) and isinstance(required, list):
            names = [name for name in required if isinstance(name, str)]
            schema["properties"] = {**listed, **{name: {} for name in names if name not in listed}}
    return schema
