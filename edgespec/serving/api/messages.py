"""Messages and tools of the OpenAI API: untrusted JSON to what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import UsageError
from edgespec.generation.tools import CHOICES, Tool, tools_of
from edgespec.serving.api.limits import Limits
from edgespec.serving.api.values import boolean, shown, wrong

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Message = dict[str, Any]


def read_messages(value: object, limits: Limits) -> list[Message]:
    """The messages of a conversation, as chat templates take them.

    Raises:
        UsageError: they have another form.
    """
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a non-empty list.")
    if len(value) > limits.messages:
        raise UsageError(f"There are {len(value):,} messages.", f"At most {limits.messages:,} are allowed.")
    messages = [_message(message) for message in value]
    _name_results(messages)
    return messages


def read_tools(body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """The settings for tools in a body: those of `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        UsageError: they have another form, or are not for this endpoint.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    if given in (None, []) and choice in (None, "auto", "none"):
        boolean(body, "parallel_tool_calls")
        return {}
    if not chat:
        raise UsageError("Only chats can use tools.", "Leave out 'tools' and 'tool_choice'.")
    if given is not None and not isinstance(given, list):
        raise wrong("tools", given, "a list")
    tools: tuple[Tool, ...] = tools_of(given or [])
    return {
        "tools": tools,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": boolean(body, "parallel_tool_calls", default=True),
    }


def texts_of(value: object) -> list[str]:
    """All texts within messages, however deep."""
    found: list[str] = []
    unseen = [value]
    while unseen:
        item = unseen.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            unseen.extend(item.values())
        elif isinstance(item, Sequence):
            unseen.extend(item)
    return found


def _choice(value: object) -> str:
    if value is None:
        return "auto"
    if isinstance(value, str) and value in CHOICES:
        return value
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name not in CHOICES:
            return name
    raise wrong("tool_choice", value, f"{', '.join(CHOICES)}, or a function by its name")


def _message(message: object) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str) or role not in _ROLES:
        raise UsageError("A message has no valid role.", f"Roles: {', '.join(_ROLES)}.")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    calls = message.get("tool_calls") if role == "assistant" else None
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise UsageError("The content of a message must be a string.")
    result: Message = {"role": _ROLES[role], "content": content}
    if calls:
        if not isinstance(calls, list):
            raise wrong("tool_calls", calls, "a list")
        result["tool_calls"] = [_call(call) for call in calls]
    thought = message.get("reasoning_content") if role == "assistant" else None
    if isinstance(thought, str) and thought:
        result["reasoning_content"] = thought  # templates show it within a chain of calls
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        result["tool_call_id"] = message["tool_call_id"]
    if role == "tool" and isinstance(message.get("name"), str):
        result["name"] = message["name"]
    return result


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise UsageError("A tool call in a message is invalid.", "It must have a function with a name.")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"The arguments of the call to {shown(name)} are not a JSON object.")
    identifier = call.get("id")
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


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise UsageError("A part of a message is not of type text.", "Send text.")
    return text
