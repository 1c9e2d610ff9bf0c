"""Schemas, closed: a model must not invent names that no schema lists.

A JSON schema without `additionalProperties` permits any further names. That is meant for validating, not for
generating. Few people write it out; those who want further names can: `"additionalProperties": true`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_FURTHER_NAMES = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
# These may add properties to those that stand beside them.
_COMPOSING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_OF_SCHEMAS = ("properties", *_DEFINITIONS)
_LISTS = ("anyOf", "oneOf", "prefixItems")


def closed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the listed properties only, unless it says otherwise."""
    # What is composed by allOf may be defined anywhere, and its parts must permit one another's properties.
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    composed = "properties" in schema and any(key in schema for key in _COMPOSING)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _closed(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list) and not composed:
            found[key] = [_closed(part) for part in value]
        elif key in ("items", "additionalProperties"):
            found[key] = _closed(value)
        else:
            found[key] = value
    if "properties" in schema and not composed and not any(key in schema for key in _FURTHER_NAMES):
        found["additionalProperties"] = False
    if found.get("additionalProperties") is False and "patternProperties" not in schema:
        _list_required(found)
    return found


def _list_required(schema: dict[str, Any]) -> None:
    """List the properties that an object must have and does not list, so that some object fits."""
    listed, required = schema.get("properties", {}), schema.get("required")
    if isinstance(listed, Mapping) and isinstance(required, list):
        required = [name for name in required if isinstance(name, str)]
        schema["properties"] = {**listed, **{name: {} for name in required if name not in listed}}
