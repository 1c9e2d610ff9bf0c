"""Checks the arguments of a call against the schema that its tool declared, of which not all may be enforced.

Regular expressions are not tried: those of strangers may take forever.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from edgespec.text.calls.argument_values import types_of

_MAX_DEPTH = 32
_BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_LENGTHS = {"minLength": (str, 1), "maxLength": (str, -1), "minItems": (list, 1), "maxItems": (list, -1)}


def misfit(value: Any, schema: Any, root: Any = None, place: str = "", depth: int = 0) -> str:
    """The reason why a value does not fit a schema, as a clause; empty if none is found.

    Args:
        root: the schema that references lead into; None for this one.
        place: the names that lead to the value.
    """
    root = schema if root is None else root
    if schema is False:
        return f"{place or 'something'} is not permitted"
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ""

    def other(part: Any, item: Any = value, name: str = place) -> str:
        return misfit(item, part, root, name, depth + 1)

    shown = repr(place) if place else "the whole"
    found = other(_referred(schema.get("$ref"), root)) if "$ref" in schema else ""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and not types_of(value) & {str(kind) for kind in kinds}:
        return f"{shown} is not of the type {' or '.join(map(str, kinds))}"
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return f"{shown} is not one of the listed values"
    if "const" in schema and value != schema["const"]:
        return f"{shown} is not the listed value"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for key, holds in _BOUNDS.items():
            bound = schema.get(key)
            if isinstance(bound, int | float) and not isinstance(bound, bool) and not holds(value, bound):
                return f"{shown} is beyond its {key}"
    for key, (kind, sign) in _LENGTHS.items():
        bound = schema.get(key)
        if isinstance(value, kind) and type(bound) is int and sign * (len(value) - bound) < 0:
            return f"{shown} is beyond its {key}"
    for part in _list(schema.get("allOf")):
        found = found or other(part)
    for key in ("anyOf", "oneOf"):
        parts = _list(schema.get(key))
        fitting = sum(not other(part) for part in parts)
        if parts and (not fitting or (key == "oneOf" and fitting > 1)):
            found = found or f"{shown} fits {'none' if not fitting else 'several'} of its alternatives"
    if "not" in schema and not other(schema["not"]):
        found = found or f"{shown} is excluded"
    if isinstance(value, Mapping):
        found = found or _in_object(value, schema, place, other)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for n, item in enumerate(value):
            found = found or other(schema["items"], item, f"{place}.{n}".lstrip("."))
    return found


def _in_object(value: Mapping[str, Any], schema: Mapping[str, Any], place: str, other: Any) -> str:
    listed = schema.get("properties")
    listed = listed if isinstance(listed, Mapping) else {}
    for name in _list(schema.get("required")):
        if name not in value:
            return f"{name!r} is missing"
    for name, item in value.items():
        further = {} if "patternProperties" in schema else schema.get("additionalProperties", {})
        found = other(listed.get(name, further), item, f"{place}.{name}".lstrip("."))
        if found:
            return str(found)
    return ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: Any, root: Any) -> Any:
    """The schema that a reference leads to; one that permits anything if none is there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    found = root
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return {} if found is None else found
