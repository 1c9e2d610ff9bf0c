"""Requests of the Messages API, translated to requests for a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from edgespec.api.completion_request import CompletionFields, TranslatedRequest
from edgespec.api.contents import Part, content_of, parts_of, text_of, text_part, without_header_lines
from edgespec.api.fields import read_fields
from edgespec.api.formats import ResponseFormat
from edgespec.api.messages import Call, CalledFunction, ChatMessage, read_messages
from edgespec.api.settings import Budget, Schema, Settings
from edgespec.api.tools import ToolDefinition, ToolReference
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.generation.thinking import EFFORTS
from edgespec.serving.anthropic.client_tools import client_tool

_CALLS, _RESULT = ("tool_use", "server_tool_use", "mcp_tool_use"), "_result"


class TurnMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Part] | None = None


class OfferedTool(Struct):
    """A tool that the model may call; those of other types than "custom" have schemas that the API knows."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Struct):
    """The choice among tools."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """The amount of thinking that is asked for."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Budget | None = None


class OutputFormat(Struct):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: Schema | None = None


class OutputConfig(Struct):
    """The form of the answer, and the effort for it."""

    format: OutputFormat | None = None
    effort: str | None = None


class MessagesBody(Settings, kw_only=True):
    unsupported: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "Let the client call the servers' tools.",
        "container": "No code is run here.",
        "context_management": "Nothing is left out of a conversation.",
        "compaction": "Nothing is left out of a conversation.",
        "thread": "Send the whole conversation.",
        "fallbacks": "One model is served.",
        "fallback_credit_token": "One model is served.",
    }
    without_effect: ClassVar[tuple[str, ...]] = (
        *("metadata", "service_tier", "cache_control", "betas", "user_profile_id"),
        *("inference_geo", "speed", "anthropic_version", "diagnostics", "workspace_id", "billing_policy"),
    )

    messages: Annotated[list[TurnMessage], Meta(min_length=1)]
    system: str | list[Part] = ""
    stop_sequences: list[str] | None = None
    tools: Sequence[OfferedTool] = ()
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


def as_chat(body: object, warnings: Warnings, *, counts: bool = False) -> TranslatedRequest:
    """The request for a chat that a request for a message stands for.

    Args:
        counts: the request only counts tokens, so it needs no `max_tokens`.
    """
    fields = read_fields(body, MessagesBody, warnings)
    if fields.max_tokens is None and not counts:
        raise UsageError("max_tokens is missing.", "Set it to the maximum tokens of the answer.")
    config = fields.output_config or OutputConfig()
    form = config.format or fields.output_format
    choice = fields.tool_choice
    chat = fields.as_kind(
        CompletionFields,
        stop=fields.stop if fields.stop_sequences is None else fields.stop_sequences,
        tools=[_tool(tool) for tool in fields.tools],
        tool_choice=choice and _choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        think=_think(fields.thinking, config.effort) if fields.think is None else fields.think,
        response_format=form and ResponseFormat(type="json_schema", schema=form.schema),
    )
    # Without header lines first: joined blocks would not show where such a line ends.
    blocks = [part for part in parts_of(fields.system) if getattr(part, "text", part) != ""]
    system = text_of(without_header_lines(blocks, warnings), warnings, "\n\n")
    told = [ChatMessage(role="system", content=system)] if system else []
    told += [message for turn in fields.messages for message in _messages(turn, warnings)]
    return TranslatedRequest(chat, read_messages(told, warnings), warnings)


def _messages(turn: TurnMessage, warnings: Warnings) -> list[ChatMessage]:
    """The messages of a turn: results of tools are messages of their own, before what the user says."""
    parts: list[Any] = parts_of(turn.content)
    if turn.role == "system":
        return [ChatMessage(role="system", content=text_of(parts, warnings, "\n\n"))]
    results = [_result(part, warnings) for part in parts if _is_result(part)]
    said = [part for part in parts if not _is_result(part) and not _is_call(part)]
    calls = [Call(p.id, CalledFunction(p.name or "", p.input)) for p in parts if _is_call(p)]
    if turn.role == "assistant":  # results are those of the API's own servers
        return [ChatMessage(role="assistant", content=said, tool_calls=calls), *results]
    return [*results, *([ChatMessage(role="user", content=said)] if said or not results else [])]


def _is_call(part: str | Part) -> bool:
    return isinstance(part, Part) and part.type in _CALLS


def _is_result(part: str | Part) -> bool:
    return isinstance(part, Part) and (part.type or "").endswith(_RESULT) and part.tool_use_id is not None


def _result(part: Part, warnings: Warnings) -> ChatMessage:
    content = content_of(part.content, warnings, "\n")
    if part.is_error:
        if not isinstance(content, str):
            content = [text_part("Error: "), *content]
        elif not content.lower().startswith("error"):
            content = f"Error: {content}"
    return ChatMessage(role="tool", tool_call_id=part.tool_use_id, content=content)


def _tool(tool: OfferedTool) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        return client_tool(tool.type, tool.name) or ToolDefinition(type=tool.type, name=tool.name)
    return ToolDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)


def _choice(choice: ToolChoice) -> str | ToolReference:
    if choice.type == "tool":
        return ToolReference(name=choice.name)
    return "required" if choice.type == "any" else choice.type


def _think(asked: Thinking | None, effort: str | None) -> str | int | None:
    """The thinking that a request asks for; None if it leaves that open."""
    if asked is None:
        return None
    if asked.type == "disabled":
        return "off"
    if asked.type == "enabled":
        return "on" if asked.budget_tokens is None else asked.budget_tokens
    return effort if effort in EFFORTS else "on"
