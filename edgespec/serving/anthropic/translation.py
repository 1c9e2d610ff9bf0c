"""Requests of the Messages API, translated to requests for a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.api.contents import content_of, text_of, text_part, thought_of, without_thoughts
from edgespec.api.header_lines import without_header_lines
from edgespec.api.values import boolean, integer, shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.generation.thinking import EFFORTS

Block = Mapping[str, Any]
Messages = list[dict[str, Any]]

# Fields with the name and meaning that they have in a request for a chat; those of the second line are ours.
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "max_tokens"),
    *("min_p", "seed", "think", "repeat_penalty", "frequency_penalty", "presence_penalty", "penalty_window"),
)
_OTHERS = (
    *("system", "messages", "stop_sequences", "tools", "tool_choice", "thinking"),
    *("output_config", "output_format"),
)
_NOT_SUPPORTED = {
    "mcp_servers": "Let the client call the servers' tools.",
    "container": "No code is run here.",
    "context_management": "Nothing is left out of a conversation.",
    "compaction": "Nothing is left out of a conversation.",
    "thread": "Send the whole conversation.",
    "fallbacks": "One model is served.",
    "fallback_credit_token": "One model is served.",
}
# Clients send these, and they change nothing about an answer here.
_WITHOUT_EFFECT = (
    *("metadata", "service_tier", "cache_control", "betas", "user_profile_id"),
    *("inference_geo", "speed", "anthropic_version", "diagnostics", "workspace_id", "billing_policy"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CUSTOM = (None, "custom")
_CALLS, _RESULT = ("tool_use", "server_tool_use", "mcp_tool_use"), "_result"


def as_chat(body: object, warnings: Warnings, *, counts: bool = False) -> dict[str, Any]:
    """The request for a chat that a request for a message stands for.

    Args:
        counts: the request only counts tokens, so it needs no `max_tokens`.

    Raises:
        UsageError: a field is missing, or has another type.
    """
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    if body.get("max_tokens") is None and not counts:
        raise UsageError("max_tokens is missing.", "Set it to the maximum tokens of the answer.")
    for name, why in _NOT_SUPPORTED.items():
        if body.get(name) not in (None, "", [], {}):
            warnings.ignored(name, why)
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = [*_system(body.get("system"), warnings), *_messages(body.get("messages"), warnings)]
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    chat |= _tools(body.get("tools"), body.get("tool_choice"), warnings)
    form = _format(body)  # first, as it checks output_config, which thinking reads too
    chat |= _thinking(body)
    if form is not None:
        chat["response_format"] = form
    known = {*_SAME, *_OTHERS, *_WITHOUT_EFFECT, *_NOT_SUPPORTED}
    return chat | {name: value for name, value in body.items() if name not in known and name not in chat}


def _system(value: object, warnings: Warnings) -> Messages:
    """The system prompt, without header lines: joined blocks would not show where such a line ends."""
    blocks: Any = without_header_lines(list(_blocks("system", value or [])), warnings)
    kept = [block for block in blocks if block.get("text") != ""]
    return [{"role": "system", "content": text_of(kept, warnings, "\n\n")}] if kept else []


def _messages(value: object, warnings: Warnings) -> Messages:
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a non-empty list.")
    messages: Messages = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        blocks = _blocks("content", content)
        if role == "user":
            messages += _asked(blocks, warnings)
        elif role == "assistant":
            messages += _answered(blocks, warnings)
        elif role == "system":
            messages.append({"role": "system", "content": text_of(blocks, warnings, "\n\n")})
        else:
            raise UsageError(f"The role of a message must be user or assistant, not {shown(role)}.")
    return messages


def _asked(blocks: Sequence[Block], warnings: Warnings) -> Messages:
    """A user's message: results of tools are messages of their own, before what the user says."""
    results = [_result(block, warnings) for block in blocks if _is_result(block)]
    rest = [block for block in blocks if not _is_result(block)]
    told = [{"role": "user", "content": content_of(rest, warnings)}] if rest or not results else []
    return [*results, *told]


def _answered(blocks: Sequence[Block], warnings: Warnings) -> Messages:
    """An earlier answer: its text, its thought and its calls; and what the API's servers have returned."""
    message: dict[str, Any] = {"role": "assistant"}
    said: list[Block] = []
    results: Messages = []
    for block in without_thoughts(list(blocks)):  # type: ignore[attr-defined]
        if block.get("type") in _CALLS:
            called = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": called}
            message.setdefault("tool_calls", []).append(call)
        elif _is_result(block):
            results.append(_result(block, warnings))
        else:
            said.append(block)
    thought = thought_of(list(blocks))
    if thought:
        message["reasoning_content"] = thought
    return [message | {"content": text_of(said, warnings)}, *results]


def _is_result(block: Block) -> bool:
    return str(block.get("type")).endswith(_RESULT) and "tool_use_id" in block


def _result(block: Block, warnings: Warnings) -> dict[str, Any]:
    identifier = block.get("tool_use_id")
    if not isinstance(identifier, str):
        raise UsageError("The result of a tool has no tool_use_id.")
    content = content_of(block.get("content"), warnings, "\n")
    if boolean(block, "is_error"):
        if not isinstance(content, str):
            content = [text_part("Error: "), *content]
        elif not content.lower().startswith("error"):
            content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": identifier, "content": content}


def _blocks(name: str, value: object) -> Sequence[Block]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(block, Mapping) for block in value):
        raise wrong(name, value, "a string or a list of blocks")
    return value


def _tools(given: object, choice: object, warnings: Warnings) -> dict[str, Any]:
    """The tools and the choice among them, as a request for a chat has them."""
    if given is not None and not isinstance(given, list):
        raise wrong("tools", given, "a list")
    tools = [_tool(tool, warnings) for tool in given or []]
    chat: dict[str, Any] = {"tools": tools} if tools else {}
    if choice is None:
        return chat
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or kind not in (*_CHOICES, "tool"):
        raise wrong("tool_choice", choice, "an object whose type is auto, any, tool or none")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        chat["tool_choice"] = _CHOICES[kind]
    if boolean(choice, "disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _tool(tool: object, warnings: Warnings) -> object:
    """A tool as a request for a chat has it; those that only the API's servers define stay as they are."""
    if not isinstance(tool, Mapping):
        raise UsageError(f"A tool must be an object, not {shown(tool)}.")
    if tool.get("type") not in _CUSTOM:
        return tool
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """The thinking that a request asks for; nothing if it leaves that open."""
    value = body.get("thinking")
    if value is None or body.get("think") is not None:  # the latter is ours, and more precise
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("enabled", "adaptive", "disabled"):
        raise wrong("thinking", value, "an object whose type is enabled, adaptive or disabled")
    if kind == "disabled":
        return {"think": "off"}
    if kind == "enabled":
        budget = integer(value, "budget_tokens", 0, 2**31 - 1)
        return {"think": "on" if budget is None else budget}
    effort = (body.get("output_config") or {}).get("effort")
    return {"think": effort if effort in EFFORTS else "on"}


def _format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The format of the answer, as a request for a chat has it."""
    config = body.get("output_config")
    if not isinstance(config, Mapping | None):
        raise wrong("output_config", config, "an object")
    form = (config or {}).get("format") or body.get("output_format")
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise wrong("output_config.format", form, "an object whose type is json_schema")
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema", {})}}
