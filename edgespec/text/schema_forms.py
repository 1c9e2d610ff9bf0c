"""Tools in the form for a chat template that fails where a schema leaves out what schemas may leave out.

Command R+'s joins the description of each argument to a text, and asks objects and lists what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = ("tools", "xml_tools")
_TYPES = ("string", "number", "integer", "boolean", "array", "object")


def with_whole_schemas(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a template in which the tools' schemas have all keys that a template may look for."""
    return {
        name: [_whole_tool(tool) for tool in value] if name in _NAMES and value else value
        for name, value in variables.items()
    }


def _whole_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    function = {"description": "", **tool["function"]}
    function["parameters"] = _whole(function.get("parameters"), is_root=True)
    return {**tool, "function": function}


def _whole(schema: Any, *, is_root: bool = False) -> dict[str, Any]:
    """A schema with a type that every template knows, a description, and what lists and objects hold."""
    given = dict(schema) if isinstance(schema, Mapping) else {}
    kinds = given.get("type")
    known = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in _TYPES]
    kind: Any = known[0] if len(known) == 1 else known or ("object" if is_root else "string")
    whole = given | {"type": kind, "description": given.get("description") or ""}
    if "array" in known:
        whole["items"] = _whole(given.get("items"))
    if is_root or "object" in known:
        properties = given.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        whole["properties"] = {name: _whole(value) for name, value in properties.items()}
        whole["required"] = given.get("required") or []
        whole["additionalProperties"] = _whole(given.get("additionalProperties"))
    return whole
