"""Messages of the OpenAI API: untrusted JSON to what chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.api.arguments import arguments_of
from edgespec.api.contents import content_of, note, text_of, thought_of, without_thoughts
from edgespec.api.header_lines import without_header_lines
from edgespec.api.images import RequestImages, blind
from edgespec.api.limits import Limits
from edgespec.api.tools import CUSTOM_INPUT
from edgespec.api.values import shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
Message = dict[str, Any]


def read_messages(
    value: object, limits: Limits, warnings: Warnings, images: RequestImages | None = None
) -> list[Message]:
    """The messages of a conversation, as the engine takes them.

    Args:
        images: reads those of the request; without it, they become notes.

    Raises:
        UsageError: they have another form.
    """
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a non-empty list.")
    if len(value) > limits.messages:
        raise UsageError(f"There are {len(value):,} messages.", f"At most {limits.messages:,} are allowed.")
    images = images or RequestImages(limits, warnings, blind)
    messages = [_message(message, warnings, images) for message in _without_header_lines(value, warnings)]
    _name_results(messages)
    return messages


def texts_of(value: object) -> list[str]:
    """All texts within messages, however deep, without what images consist of."""
    found: list[str] = []
    unseen = [value]
    while unseen:
        item = unseen.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            unseen.extend(item.values())
        elif isinstance(item, Sequence) and not isinstance(item, bytes):
            unseen.extend(item)
    return found


def _without_header_lines(messages: list[object], warnings: Warnings) -> list[object]:
    """The messages, without lines in front of their system prompt that are not for the model."""
    first, *rest = messages
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return messages
    content = first.get("content")
    kept = without_header_lines(content, warnings)
    if kept is content:
        return messages
    return [first | {"content": kept}, *rest] if kept or not rest else rest


def _message(message: object, warnings: Warnings, images: RequestImages) -> Message:
    if not isinstance(message, dict):
        raise UsageError(f"A message must be an object, not {shown(message)}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong("The role of a message", role, f"one of {', '.join(_ROLES)}")
    told, content = _ROLES[role], message.get("content")
    result: Message = {"role": told}
    if told == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning") or thought_of(content)
        content = without_thoughts(content)
        calls = _calls(message, warnings)
        if calls:
            result["tool_calls"] = calls
        if isinstance(thought, str) and thought:
            result["reasoning_content"] = thought  # templates show it within a chain of calls
        if content is None and isinstance(message.get("refusal"), str):
            content = message["refusal"]
        if message.get("audio"):
            content = [
                *(content if isinstance(content, list) else [content or ""]),
                note("A sound", warnings),
            ]
    if told == "tool":
        for name in ("tool_call_id", "name"):
            if isinstance(message.get(name), str):
                result[name] = message[name]
    if told == "assistant":  # what the model says is text
        result["content"] = text_of(content, warnings)
    else:
        result["content"] = images.read(content_of(content, warnings))
    return result


def _calls(message: Mapping[str, Any], warnings: Warnings) -> list[dict[str, Any]]:
    """The calls of an answer; also in the form that the API had before there were tools."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise wrong("tool_calls", calls, "a list")
    if message.get("function_call"):
        calls = [*calls, {"function": message["function_call"]}]
    return [_call(call, warnings) for call in calls]


def _call(call: object, warnings: Warnings) -> dict[str, Any]:
    custom = call.get("custom") if isinstance(call, Mapping) else None
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(custom, Mapping):
        function = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom.get("input")}}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise UsageError("A tool call in a message is invalid.", "It must have a function with a name.")
    identifier = call.get("id")
    arguments = arguments_of(function.get("arguments"), shown(name), warnings)
    return {
        "id": identifier if isinstance(identifier, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _name_results(messages: Sequence[Message]) -> None:
    """Give results the names of the tools that they are from, which some templates show."""
    names = {
        call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())
    }
    for message in messages:
        name = names.get(message.get("tool_call_id", ""))
        if name and "name" not in message:
            message["name"] = name
