"""Schemas without what cannot be enforced while text is generated.

Programs send schemas that were made for validating. One keyword that llguidance does not implement would cost
the whole request. Without it a schema only permits more, and programs check what they get.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_UNIMPLEMENTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
        *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicAnchor", "$dynamicRef"),
    )
)
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
# Looks around, or back at what it has found; \b and \B look around, too.
_NO_AUTOMATON = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bB]|\\k<)")

# Programs write the range of a machine's integers, for which no automaton can be made.
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_MAX_BOUND = 2**53

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")


def loosened(schema: Any, left_out: set[str]) -> Any:
    """A schema that permits whatever this one does, and that grammars can be made of.

    Args:
        left_out: gets the keywords that are left out.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _UNIMPLEMENTED or not _can_be_enforced(key, value):
            left_out.add(key)
        elif key in _OF_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: loosened(part, left_out) for name, part in value.items()}
        elif key == "oneOf" and "anyOf" not in schema and isinstance(value, list):
            left_out.add(key)
            found["anyOf"] = [loosened(part, left_out) for part in value]
        elif key in _LISTS and isinstance(value, list):
            found[key] = [loosened(part, left_out) for part in value]
        elif key in _SCHEMAS:
            found[key] = loosened(value, left_out)
        else:
            found[key] = value
    if "patternProperties" in schema and "patternProperties" not in found:
        found.pop("additionalProperties", None)  # which counted for the other names
    return found


def _can_be_enforced(key: str, value: Any) -> bool:
    """True if the value of a keyword is one that grammars can be made of."""
    if key == "format":
        return value in _FORMATS
    if key in _BOUNDS:
        return not isinstance(value, int) or abs(value) <= _MAX_BOUND
    if key == "pattern":
        return _is_automaton(value)
    if key == "patternProperties" and isinstance(value, Mapping):
        return all(map(_is_automaton, value))
    return True


def _is_automaton(pattern: Any) -> bool:
    return not (isinstance(pattern, str) and _NO_AUTOMATON.search(pattern))
