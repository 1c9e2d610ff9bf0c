"""Requests of the Responses API (`/v1/responses`), which are turned into requests for a chat.

Nothing is stored, so each brings the whole conversation: messages, calls of functions, and their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import UsageError
from edgespec.serving.api.completion_request import CHAT_FIELDS
from edgespec.serving.api.values import shown, wrong

# Fields with the name and meaning that they have in a request for a chat.
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "think", "stop", "penalty_window"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty", "grammar", "json_schema"),
    *("user", "metadata", "store", "parallel_tool_calls"),
)
_INSTEAD = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
_INSTEAD |= {"max_completion_tokens": "max_output_tokens", "response_format": "text"}
_INSTEAD |= {"reasoning_effort": "reasoning"}
# These would change the answer, or what can be done with it later.
_UNSUPPORTED = {
    "previous_response_id": "Responses are not stored, so continuing one is",
    "conversation": "Responses are not stored, so conversations are",
    "background": "Answering in the background is",
    "top_logprobs": "Log-probabilities are served at /v1/chat/completions; here they are",
}
_OTHERS = (
    "input",
    "instructions",
    "max_output_tokens",
    "text",
    "reasoning",
    "tools",
    "tool_choice",
    "include",
)
# Clients ask for it where nothing is stored; thoughts are not encrypted here, so they come anyway.
_INCLUDED = "reasoning.encrypted_content"
_WITHOUT_EFFECT = (
    *("truncation", "service_tier", "safety_identifier", "max_tool_calls"),
    *("prompt_cache_key", "prompt_cache_retention", "stream_options"),
)
_TEXTS = ("input_text", "output_text", "text")


def as_chat(body: object) -> dict[str, Any]:
    """The request for a chat that a request for a response stands for.

    Raises:
        UsageError: a field has another form, or is not supported here.
    """
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    for name, what in _UNSUPPORTED.items():
        if body.get(name) not in (None, False, "", [], {}):
            raise UsageError(f"{what} not supported.", f"Leave out {name!r}.")
    included = body.get("include")
    if included not in (None, [], [_INCLUDED]):
        raise UsageError("Including more output is not supported.", "Leave out 'include'.")
    messages = _messages(body.get("input"))
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise wrong("instructions", instructions, "a string")
        messages.insert(0, {"role": "system", "content": instructions})
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    chat |= _tools(body)
    form = _form(body.get("text"))
    if form is not None:
        chat["response_format"] = form
    reasoning = body.get("reasoning")
    if not isinstance(reasoning, dict | None):
        raise wrong("reasoning", reasoning, "an object")
    if reasoning and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    known = {*_SAME, *_UNSUPPORTED, *_OTHERS, *_WITHOUT_EFFECT}
    more = {name: value for name, value in body.items() if name not in known}
    for name in CHAT_FIELDS:
        if more.pop(name, None) is not None:
            hint = f"Write {_INSTEAD[name]!r}." if name in _INSTEAD else f"Leave out {name!r}."
            raise UsageError(f"A request for a response has no field {name!r}.", hint)
    return chat | more


def _messages(value: object) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UsageError("input must be a non-empty string or list of messages.")
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in value:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "reasoning":
            thought = _thought(item)
            continue
        elif kind == "function_call":
            _add_call(messages, item, thought)
        elif kind == "function_call_output":
            output, identifier = _content(item.get("output")), item.get("call_id")
            if output is None or not isinstance(identifier, str):
                raise UsageError(
                    "The result of a call is invalid.", "It must have a 'call_id' and an 'output'."
                )
            messages.append({"role": "tool", "tool_call_id": identifier, "content": output})
        else:
            raise UsageError(
                f"Input items of type {shown(kind)} are not supported.",
                "Supported: message, reasoning, function_call and function_call_output.",
            )
        thought = ""
    if not messages:
        raise UsageError("The input has no messages.")
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], thought: str) -> None:
    """Add a call to the answer that it is part of: templates show an answer with all its calls."""
    called = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
    call = {"id": item.get("call_id"), "type": "function", "function": called}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    if thought:  # templates show it within a chain of calls; others are left out
        messages[-1]["reasoning_content"] = thought
    messages[-1].setdefault("tool_calls", []).append(call)


def _thought(item: Mapping[str, Any]) -> str:
    """The text of an earlier thought; empty if it has none."""
    parts = item.get("content") or item.get("summary")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _content(value: object) -> Any:
    return [_text(part) for part in value] if isinstance(value, list) else value


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The tools and the choice among them, as a request for a chat has them.

    Agents send all tools that they know. So those that are no functions are left out beside others that are,
    and the reply names them; a model that never calls them answers as it would anyway.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    if not isinstance(given, list | None):
        raise wrong("tools", given, "a list")
    tools, others = [], {}
    for tool in given or []:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            tools.append({"type": "function", "function": tool})
        else:
            others[shown(kind)] = tool
    if others and not tools:
        raise UsageError(
            f"Tools of type {next(iter(others))} are not supported.",
            'Functions are: {"type": "function", "name": ..., "parameters": ...}.',
        )
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat: dict[str, Any] = {"tools": tools} if tools else {}
    chat |= {
        f"tools of type {kind}": tool for kind, tool in others.items()
    }  # which is not known, as the reply says
    return chat if choice is None else chat | {"tool_choice": choice}


def _text(part: object) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    raise UsageError("A part of the input is not of type text.", "Send text.")


def _form(value: object) -> dict[str, Any] | None:
    """The format of the answer, as a request for a chat has it."""
    if not isinstance(value, dict | None):
        raise wrong("text", value, "an object")
    form = (value or {}).get("format")
    if not isinstance(form, dict | None):
        raise wrong("text.format", form, "an object")
    if form is None or form.get("type") != "json_schema":
        return form
    wanted = {"schema": form.get("schema", {}), "strict": form.get("strict")}
    return {"type": "json_schema", "json_schema": wanted}
