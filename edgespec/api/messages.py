"""Messages of the OpenAI API: untrusted JSON to what chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edgespec.api.arguments import arguments_of
from edgespec.api.contents import (
    Part,
    content_of,
    note,
    parts_of,
    text_of,
    thought_of,
    without_header_lines,
    without_thoughts,
)
from edgespec.api.tools import CUSTOM_INPUT
from edgespec.api.warnings import Warnings, shown
from edgespec.errors import UsageError

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Message = dict[str, Any]
"""A message as chat templates take it; images have their addresses."""

_ROLES = {"developer": "system", "function": "tool"}


class CalledFunction(Struct):
    name: str
    arguments: Any = None


class CalledTool(Struct):
    """The custom tool that a call names."""

    name: str
    input: Any = None


class Call(Struct):
    """A call in an answer."""

    id: str | None = None
    function: CalledFunction | None = None
    custom: CalledTool | None = None


class ChatMessage(Struct, kw_only=True):
    role: Role
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None  # as the API had it before there were tools
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None


ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1)]


def read_messages(given: Sequence[ChatMessage], warnings: Warnings) -> list[Message]:
    """The messages of a conversation, without header lines in front of its system prompt."""
    contents = [parts_of(message.content) for message in given]
    if given[0].role in ("system", "developer"):
        kept = without_header_lines(contents[0], warnings)
        if contents[0] and not kept and len(given) > 1:
            given, contents = given[1:], contents[1:]
        else:
            contents[0] = kept
    return [_message(message, parts, warnings) for message, parts in zip(given, contents, strict=True)]


def name_results(messages: Sequence[Message]) -> None:
    """Give results the names of the tools that they are from, which some templates show."""
    names: dict[str, str] = {}  # clients may use the same ids in each turn
    for message in messages:
        calls = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls if call["id"]}
        name = names.get(message.get("tool_call_id", ""))
        if name and "name" not in message:
            message["name"] = name


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


def _message(message: ChatMessage, parts: list[str | Part], warnings: Warnings) -> Message:
    role = _ROLES.get(message.role, message.role)
    if role != "assistant":
        about = {"tool_call_id": message.tool_call_id, "name": message.name} if role == "tool" else {}
        found = {name: value for name, value in about.items() if value is not None}
        return {"role": role, **found, "content": content_of(parts, warnings)}
    thought = message.reasoning_content or message.reasoning or thought_of(parts)
    said = without_thoughts(parts)
    if message.content is None and message.refusal:
        said.append(message.refusal)
    if message.audio:
        said.append(note("A sound", warnings))
    calls = [_call(call, warnings) for call in message.tool_calls or ()]
    if message.function_call:
        calls.append(_call(Call(function=message.function_call), warnings))
    return {
        "role": role,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thought} if thought else {}),  # templates show it within a chain of calls
        "content": text_of(said, warnings),  # what the model says is text
    }


def _call(call: Call, warnings: Warnings) -> dict[str, Any]:
    if call.custom is not None:
        name, given = call.custom.name, {CUSTOM_INPUT: call.custom.input}
    elif call.function is not None:
        name, given = call.function.name, call.function.arguments
    else:
        raise UsageError("A tool call in a message is invalid.", "It must have a function with a name.")
    function = {"name": name, "arguments": arguments_of(given, shown(name), warnings)}
    return {"id": call.id or "", "type": "function", "function": function}
