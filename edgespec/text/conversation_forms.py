"""The forms of a conversation for a chat template that refuses it as it is, or leaves some of it out.

Programs send several system messages, some of them late, two questions in a row, and ids of any shape. Many
templates take one system message at the beginning, let question and answer alternate, or want ids of nine
letters. Each form changes no more than the one before it has to.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_BETWEEN = "\n\n"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_SHOWN = ("system", "user")
_MERGED = ("system", "user", "assistant")


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation as it is, and then in other forms that say the same, each once."""
    given = list(messages)
    with_ids = _with_short_ids(given)
    placed = _with_system_first(with_ids)
    merged = _alternating(placed)
    seen: list[list[Message]] = []
    for form in (given, with_ids, placed, _folded(placed), merged, _folded(merged)):
        if form not in seen:
            seen.append(form)
            yield form


def is_shown(messages: Sequence[Message], text: str) -> bool:
    """True if a rendering shows all that the system and the user say."""
    said = (message.get("content") for message in messages if message.get("role") in _SHOWN)
    return all(content.strip() in text for content in said if isinstance(content, str))


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """The messages with their texts as lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """The messages with ids of calls that have nine letters."""
    found: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": _short(call.get("id"))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": _short(message["tool_call_id"])}
        found.append(message)
    return found


def _short(identifier: object) -> str:
    text = str(identifier)
    return (
        text
        if _SHORT_ID.fullmatch(text)
        else hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:9]
    )


def _with_system_first(messages: list[Message]) -> list[Message]:
    """The messages with one system message, the first; later ones stay where they are, as the user's."""
    found: list[Message] = []
    for message in messages:
        is_system = message.get("role") == "system"
        if is_system and len(found) == 1 and found[0].get("role") == "system":
            found[0] = _joined(found[0], message)
        elif is_system and found:
            found.append({**message, "role": "user"})
        else:
            found.append(message)
    return found


def _alternating(messages: list[Message]) -> list[Message]:
    """The messages with those of the same role that follow one another joined, and the user's first."""
    found: list[Message] = []
    for message in messages:
        role = message.get("role")
        plain = role in _MERGED and not message.get("tool_calls")
        if plain and found and found[-1].get("role") == role and not found[-1].get("tool_calls"):
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    first = 1 if found and found[0].get("role") == "system" else 0
    if found[first:] and found[first].get("role") != "user":
        found.insert(first, {"role": "user", "content": ""})
    return found


def _folded(messages: list[Message]) -> list[Message]:
    """The messages with the system text before what the user says first."""
    if not messages or messages[0].get("role") != "system":
        return messages
    system, *rest = messages
    for index, message in enumerate(rest):
        if message.get("role") == "user":
            return [
                *rest[:index],
                {**message, **_joined(system, message), "role": "user"},
                *rest[index + 1 :],
            ]
    return [{**system, "role": "user"}, *rest]


def _joined(first: Message, second: Message) -> Message:
    texts = [str(message.get("content") or "") for message in (first, second)]
    return {**first, "content": _BETWEEN.join(filter(None, texts))}


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
