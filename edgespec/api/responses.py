"""Requests of the Responses API (`/v1/responses`), which are turned into requests for a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.api.contents import content_of, note, text_of
from edgespec.api.fields import CHAT_FIELDS
from edgespec.api.tools import CUSTOM_INPUT
from edgespec.api.values import shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

Messages = list[dict[str, Any]]

# Fields with the name and meaning that they have in a request for a chat.
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "think", "stop", "penalty_window"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty", "grammar", "json_schema", "logit_bias"),
    *("user", "metadata", "store", "parallel_tool_calls", "chat_template_kwargs", "moderation"),
)
_INSTEAD = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
_INSTEAD |= {"max_completion_tokens": "max_output_tokens", "response_format": "text"}
_INSTEAD |= {"reasoning_effort": "reasoning"}
_NOT_SUPPORTED = {
    "conversation": "Use 'previous_response_id', or send the conversation.",
    "background": "The answer comes at once.",
    "top_logprobs": "Log-probabilities are served at /v1/chat/completions.",
    "background_options": "The answer comes at once.",
    "context_management": "Nothing is left out of a conversation.",
    "image": "Answers are text.",
}
_OTHERS = (
    *("input", "instructions", "max_output_tokens", "text", "reasoning", "tools", "tool_choice", "include"),
    "previous_response_id",
)
# Clients ask for it where nothing is stored; thoughts are not encrypted here, so they come anyway.
_INCLUDED = "reasoning.encrypted_content"
_WITHOUT_EFFECT = (
    *("truncation", "service_tier", "safety_identifier", "max_tool_calls"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "stream_options"),
    "access_programs",
)
_MESSAGES = ("message", "agent_message")
_CALL, _OUTPUT = "_call", "_output"
_ABOUT_CALLS = ("id", "call_id", "type", "status", "output", "name", "role")


def as_chat(
    body: object, warnings: Warnings, earlier: Callable[[str], Messages] | None = None
) -> dict[str, Any]:
    """The request for a chat that a request for a response stands for.

    Args:
        earlier: gives the conversation of an earlier response by its id; None if none is kept.

    Raises:
        UsageError: a field has another form.
        Refusal: an earlier response is not kept.
    """
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    for name, why in _NOT_SUPPORTED.items():
        if body.get(name) not in (None, False, 0, "", [], {}):
            warnings.ignored(name, why)
    included = body.get("include")
    for item in included if isinstance(included, list) else []:
        if item != _INCLUDED:
            warnings.ignored(f"include {item}" if isinstance(item, str) else "include")
    messages: Messages = []
    previous = body.get("previous_response_id")
    if previous not in (None, ""):
        if not isinstance(previous, str) or earlier is None:
            raise wrong("previous_response_id", previous, "the id of a response")
        messages = earlier(previous)
    messages = [*messages, *_messages(body.get("input"), warnings)]
    instructions = body.get("instructions")
    if instructions not in (None, "", []):
        # Only for this response: the next one has instructions of its own.
        told = _messages(instructions, warnings) if isinstance(instructions, list) else []
        told = told or [{"role": "system", "content": text_of(instructions, warnings)}]
        messages = [*told, *messages]
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    chat["continue_final_message"] = False  # the answer is a new item
    chat |= _tools(body)
    chat |= _form(body.get("text"))
    reasoning = body.get("reasoning")
    if not isinstance(reasoning, dict | None):
        raise wrong("reasoning", reasoning, "an object")
    if reasoning and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    known = {*_SAME, *_NOT_SUPPORTED, *_OTHERS, *_WITHOUT_EFFECT}
    more = {name: value for name, value in body.items() if name not in known}
    for name in CHAT_FIELDS:
        if more.pop(name, None) is not None:
            warnings.ignored(name, f"Write {_INSTEAD[name]!r}." if name in _INSTEAD else "")
    return chat | more


def conversation(messages: Sequence[Mapping[str, Any]], instructions: object) -> Messages:
    """The messages of a request for a chat without the instructions, which count for one response only."""
    return [dict(message) for message in (messages[1:] if instructions not in (None, "", []) else messages)]


def _messages(value: object, warnings: Warnings) -> Messages:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UsageError("input must be a non-empty string or list of messages.")
    answered = {
        item.get("call_id")
        for item in value
        if isinstance(item, dict) and str(item.get("type")).endswith(_OUTPUT)
    }
    messages: Messages = []
    thought = ""
    for item in value:
        if not isinstance(item, dict):
            raise UsageError(f"An item of the input must be an object, not {shown(item)}.")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought = text_of(item.get("content") or item.get("summary"), Warnings())
            continue
        if kind in _MESSAGES:
            role = item.get("role", "user" if kind == "agent_message" else None)
            messages.append({"role": role, "content": item.get("content")})
        elif isinstance(kind, str) and kind.endswith(_OUTPUT):
            messages.append(_result(item, warnings))
        elif isinstance(kind, str) and kind.endswith(_CALL):
            _add_call(messages, item, kind, thought, answered, warnings)
        else:
            said = note(f"An item of the type {shown(kind)}", warnings)
            messages.append({"role": "assistant", "content": said})
        thought = ""
    if not messages:
        raise UsageError("The input has no messages.")
    return messages


def _result(item: Mapping[str, Any], warnings: Warnings) -> dict[str, Any]:
    output = item.get("output", item.get("tools"))
    said = content_of(output, warnings)
    identifier = item.get("call_id")
    return {
        "role": "tool",
        "tool_call_id": identifier if isinstance(identifier, str) else "",
        "content": said,
    }


def _add_call(
    messages: Messages,
    item: Mapping[str, Any],
    kind: str,
    thought: str,
    answered: set[Any],
    warnings: Warnings,
) -> None:
    """Add a call to the answer that it is part of: templates show an answer with all its calls.

    Args:
        answered: ids of the calls whose results are items of their own.
    """
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    if thought:  # templates show it within a chain of calls; others are left out
        messages[-1]["reasoning_content"] = thought
    identifier = item.get("call_id") or item.get("id")
    rest = {key: value for key, value in item.items() if key not in _ABOUT_CALLS and value is not None}
    if kind == "function_call":
        arguments: Any = item.get("arguments")
    elif kind == "custom_tool_call":
        arguments = {CUSTOM_INPUT: item.get("input")}
    else:
        arguments = item.get("arguments") or rest
    if (
        kind not in ("function_call", "custom_tool_call")
        and identifier not in answered
        and not item.get("output")
    ):
        # The API's own servers have run it, and the items do not say what came of it.
        said = f"[{kind}: {json.dumps(rest, ensure_ascii=False)}]" if rest else f"[{kind}]"
        warnings.add(f"An item of the type {shown(kind)} is shown to the model as text.")
        messages[-1]["content"] = "\n".join(filter(None, [text_of(messages[-1]["content"], warnings), said]))
        return
    name = item.get("name") or kind.removesuffix(_CALL)
    call = {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)
    if item.get("output") is not None and identifier not in answered:
        messages.append(_result({"call_id": identifier, "output": item["output"]}, warnings))


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The tools and the choice among them, as a request for a chat has them."""
    given = body.get("tools")
    chat: dict[str, Any] = {}
    if isinstance(given, list):
        chat["tools"] = [
            {"type": "function", "function": tool}
            if isinstance(tool, dict) and tool.get("type") == "function"
            else tool
            for tool in given
        ]
    elif given is not None:
        chat["tools"] = given
    return chat if body.get("tool_choice") is None else chat | {"tool_choice": body["tool_choice"]}


def _form(value: object) -> dict[str, Any]:
    """The format of the answer, as a request for a chat has it."""
    if not isinstance(value, dict | None):
        raise wrong("text", value, "an object")
    form = (value or {}).get("format")
    if not isinstance(form, dict | None):
        raise wrong("text.format", form, "an object")
    chat: dict[str, Any] = {"verbosity": value["verbosity"]} if value and value.get("verbosity") else {}
    return chat if form is None else chat | {"response_format": form}
