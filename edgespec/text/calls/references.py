"""References within a schema, all in one form: to definitions at its root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_DEFINITIONS = ("$defs", "definitions")


def with_local_references(schema: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    """The schema with references to its definitions only; what else is referred to becomes a definition.

    Zod refers to properties (`#/properties/from`), and some generators to the schema's own `$id`.

    Args:
        left_out: gets "$ref" if something is referred to that is not there.
    """
    added: dict[str, Any] = {}
    identifier = schema.get("$id")

    def rewritten(value: Any) -> Any:
        if isinstance(value, list):
            return [rewritten(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        found = {
            key: rewritten(item) for key, item in value.items() if key != "$id" or isinstance(item, Mapping)
        }
        if isinstance(value.get("$ref"), str):
            reference = target_of(value["$ref"])
            if reference is None:
                left_out.add("$ref")
                del found["$ref"]
            else:
                found["$ref"] = reference
        return found

    def target_of(reference: str) -> str | None:
        """A reference to a definition for any reference; None if nothing is there."""
        pointer = reference.removeprefix(identifier) if isinstance(identifier, str) else reference
        if pointer in ("", "#"):
            pointer = "#"
        elif not pointer.startswith("#/"):
            return None
        keys = [unquote(key).replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
        found: Any = schema
        for key in keys:
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return None
        if len(keys) == 2 and keys[0] in _DEFINITIONS:
            return pointer
        name = "_".join(["at", *keys]) or "at"
        if name not in added:
            added[name] = None  # it may refer to itself
            if isinstance(found, Mapping):
                found = {key: value for key, value in found.items() if key not in _DEFINITIONS}
            added[name] = rewritten(found)
        return f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"

    result: dict[str, Any] = rewritten(schema)
    if added:
        result["$defs"] = {**result.get("$defs", {}), **added}
    return result
