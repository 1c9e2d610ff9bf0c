"""Requests of the Messages API, translated to requests for a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import UsageError
from edgespec.generation.thinking import EFFORTS
from edgespec.serving.api.values import boolean, shown, wrong

Block = Mapping[str, Any]

# Fields with the name and meaning that they have in a request for a chat; those of the second line are ours.
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "max_tokens"),
    *("min_p", "seed", "think", "repeat_penalty", "frequency_penalty", "presence_penalty", "penalty_window"),
)
_OTHERS = (
    *("system", "messages", "stop_sequences", "tools", "tool_choice", "thinking"),
    *("output_config", "output_format"),
)
# Clients send these, and they change nothing about an answer here.
_WITHOUT_EFFECT = (
    *("metadata", "service_tier", "cache_control", "container", "context_management", "betas"),
    *("inference_geo", "speed", "anthropic_version", "diagnostics"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NO_IMAGE = "[An image was here. This model reads text only.]"
_ONLY_TEXT = "Send text."


def as_chat(body: object, *, counts: bool = False) -> dict[str, Any]:
    """The request for a chat that a request for a message stands for.

    Args:
        counts: the request only counts tokens, so it needs no `max_tokens`.

    Raises:
        UsageError: a field has another form, or is not supported here.
    """
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    if body.get("max_tokens") is None and not counts:
        raise UsageError("max_tokens is missing.", "Set it to the maximum tokens of the answer.")
    if body.get("mcp_servers") not in (None, []):
        raise UsageError("mcp_servers are not supported.", "Call the servers' tools in the client.")
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = [*_system(body.get("system")), *_messages(body.get("messages"))]
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    chat |= _tools(body.get("tools"), body.get("tool_choice"))
    form = _format(body)  # first, as it checks output_config, which thinking reads too
    chat |= _thinking(body)
    if form is not None:
        chat["response_format"] = form
    known = {*_SAME, *_OTHERS, *_WITHOUT_EFFECT, "mcp_servers"}
    return chat | {name: value for name, value in body.items() if name not in known and name not in chat}


def _system(value: object) -> list[dict[str, Any]]:
    if value in (None, "", []):
        return []
    return [{"role": "system", "content": _text(_blocks("system", value), "\n\n")}]


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a non-empty list.")
    messages: list[dict[str, Any]] = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role == "user":
            messages += _asked(_blocks("content", content))
        elif role == "assistant":
            messages.append(_answered(_blocks("content", content)))
        elif role == "system":
            messages.append({"role": "system", "content": _text(_blocks("content", content), "\n\n")})
        else:
            raise UsageError(f"The role of a message must be user or assistant, not {shown(role)}.")
    if messages[-1]["role"] == "assistant":
        raise UsageError(
            "The last message is the assistant's, but prefilled answers are not supported.",
            "End with a user message.",
        )
    return messages


def _asked(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A user's message: results of tools are messages of their own, before what the user says."""
    results = [_result(block) for block in blocks if block.get("type") == "tool_result"]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    return [*results, *([{"role": "user", "content": _text(rest)}] if rest or not results else [])]


def _answered(blocks: Sequence[Block]) -> dict[str, Any]:
    """An earlier answer: its text, its thought and its calls."""
    message: dict[str, Any] = {"role": "assistant"}
    said: list[Block] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            called = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": called}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise wrong("thinking", thought, "a string")
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind != "redacted_thinking":
            said.append(block)
    return message | {"content": _text(said)}


def _result(block: Block) -> dict[str, Any]:
    identifier = block.get("tool_use_id")
    if not isinstance(identifier, str):
        raise UsageError("The result of a tool has no tool_use_id.")
    parts = _blocks("content", block.get("content") or "")
    # A client that shows a picture to a model of text should be able to continue the conversation.
    texts = [{"type": "text", "text": _NO_IMAGE} if part.get("type") == "image" else part for part in parts]
    content = _text(texts, "\n")
    if boolean(block, "is_error") and not content.lower().startswith("error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": identifier, "content": content}


def _blocks(name: str, value: object) -> list[Block]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not all(isinstance(block, Mapping) for block in value):
        raise wrong(name, value, "a string or a list of blocks")
    return value


def _text(blocks: Sequence[Block], between: str = "") -> str:
    return between.join(_text_of(block) for block in blocks)


def _text_of(block: Block) -> str:
    kind, text = block.get("type"), block.get("text")
    source = block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        kind, text = "text", source.get("data")
    if kind != "text" or not isinstance(text, str):
        raise UsageError(f"Content blocks of type {shown(kind)} are not supported.", _ONLY_TEXT)
    return text


def _tools(given: object, choice: object) -> dict[str, Any]:
    """The tools and the choice among them, as a request for a chat has them."""
    if given is not None and not isinstance(given, list):
        raise wrong("tools", given, "a list")
    tools = [{"type": "function", "function": _tool(tool)} for tool in given or []]
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


def _tool(tool: object) -> dict[str, Any]:
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or kind not in (None, "custom"):
        raise UsageError(
            f"Tools of type {shown(kind)} are not supported.",
            'Tools with a schema are: {"name": ..., "description": ..., "input_schema": ...}.',
        )
    return {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }


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
        budget = value.get("budget_tokens")
        if type(budget) is not int or budget < 0:
            raise wrong("thinking.budget_tokens", budget, "an integer")
        return {"think": budget}
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
