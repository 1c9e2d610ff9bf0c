"""Requests of the Responses API (`/v1/responses`), which are turned into requests for a chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from edgespec.api.completion_request import CompletionFields, TranslatedRequest
from edgespec.api.contents import note, text_of
from edgespec.api.fields import converted, read_fields
from edgespec.api.formats import ResponseFormat
from edgespec.api.messages import (
    Call,
    CalledFunction,
    CalledTool,
    ChatMessage,
    Message,
    Role,
    read_messages,
)
from edgespec.api.response_store import ResponseStore
from edgespec.api.settings import Count, Effort
from edgespec.api.tools import SettingsWithTools
from edgespec.api.warnings import Warnings, shown
from edgespec.errors import UsageError

_MESSAGES = ("message", "agent_message")
_REFERENCE = "item_reference"
_CALL, _OUTPUT = "_call", "_output"
_ABOUT_CALLS = ("id", "call_id", "type", "status", "output", "name", "role")
# Clients ask for it where nothing is stored; thoughts are not encrypted here, so they come anyway.
_INCLUDED = "reasoning.encrypted_content"


class Reasoning(Struct):
    """The amount of thinking that is asked for."""

    effort: Effort | None = None


class TextSettings(Struct):
    """The form of the text."""

    format: ResponseFormat | None = None
    verbosity: str | None = None


class Item(Struct):
    """An item of a conversation: a message, a thought, a call, the result of one, and more."""

    type: str | None = None
    role: Role | None = None
    content: Any = None
    summary: Any = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    tools: Any = None


class ResponsesBody(SettingsWithTools, kw_only=True):
    unsupported: ClassVar[Mapping[str, str]] = {
        "messages": "Write 'input'.",
        "prompt": "Write 'input'.",
        "max_tokens": "Write 'max_output_tokens'.",
        "max_completion_tokens": "Write 'max_output_tokens'.",
        "response_format": "Write 'text'.",
        "reasoning_effort": "Write 'reasoning'.",
        "background": "The answer comes at once.",
        "background_options": "The answer comes at once.",
        "top_logprobs": "Log-probabilities are served at /v1/chat/completions.",
        "context_management": "Nothing is left out of a conversation.",
        "image": "Answers are text.",
        "moderation": "Answers are not moderated.",
    }
    without_effect: ClassVar[tuple[str, ...]] = (
        *("truncation", "service_tier", "safety_identifier", "max_tool_calls", "user", "metadata"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "stream_options"),
        "access_programs",
    )

    input: Annotated[
        str | list[dict[str, Any]],
        Meta(description="a non-empty string or list of messages"),
    ]
    instructions: str | list[dict[str, Any]] = ""
    previous_response_id: str = ""
    conversation: Any = None
    max_output_tokens: Count | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: Sequence[str] = ()
    store: bool = True


@dataclass(frozen=True)
class ResponseContext:
    """The parts of a request that its response needs, besides the prompt."""

    previous: str | None  # the id of the response that is continued
    conversation: str | None  # the id of the conversation that is continued
    asked: bytes  # what is kept of the request
    is_kept: bool  # the response is to be kept


def as_chat(body: object, warnings: Warnings, store: ResponseStore) -> TranslatedRequest:
    """The request for a chat that a request for a response stands for.

    Args:
        store: the responses that it may continue, and refer to.

    Raises:
        UsageError: a field has another form.
        Refusal: an earlier response is not kept, or an item of one.
    """
    fields = read_fields(body, ResponsesBody, warnings)
    conversation = _conversation_of(fields)
    for item in fields.include:
        if item != _INCLUDED:
            warnings.ignored(f"include {item}")
    text = fields.text or TextSettings()
    if text.verbosity not in (None, "medium"):
        warnings.ignored("text.verbosity", "Ask for the length in the prompt.")
    given = fields.input if isinstance(fields.input, str) else _with_items(fields.input, store)
    asked = _messages("input", given, warnings)
    told: Sequence[ChatMessage] = ()
    if isinstance(fields.instructions, str) and fields.instructions:
        told = [ChatMessage(role="system", content=fields.instructions)]
    elif fields.instructions:
        told = _messages("instructions", fields.instructions, warnings)
    # Instructions are only for this response: the next one has its own.
    messages = read_messages([*told, *asked], warnings)
    place = max(0, len(messages) - len(asked))
    previous: Sequence[Message] = ()
    if fields.previous_response_id:
        previous = store.conversation(fields.previous_response_id)
    elif conversation is not None and (items := store.conversations.items(conversation, to_continue=True)):
        previous = read_messages(_messages("conversation", items, Warnings()), Warnings())
    kept = [*previous, *messages[place:]]
    # As it came: images are no JSON later.
    asked_of = json.dumps({"messages": kept, "input": _named_items(given)}).encode()
    context = ResponseContext(fields.previous_response_id or None, conversation, asked_of, fields.store)
    chat = fields.as_kind(
        CompletionFields,
        max_tokens=fields.max_output_tokens,
        reasoning_effort=fields.reasoning and fields.reasoning.effort,
        response_format=text.format,
        continue_final_message=False,  # the answer is a new item
    )
    return TranslatedRequest(chat, [*messages[:place], *kept], warnings, context)


def checked_items(given: list[dict[str, Any]], store: ResponseStore) -> list[dict[str, Any]]:
    """The items that a client adds to a conversation, each with an id.

    Args:
        store: the responses whose items it may refer to.

    Raises:
        UsageError: one has another form.
        Refusal: one is not kept.
    """
    items = _named_items(_with_items(given, store))
    if any(item.get("type") != "reasoning" for item in items):
        read_messages(_messages("items", items, Warnings()), Warnings())
    return items


def _conversation_of(fields: ResponsesBody) -> str | None:
    """The id of the conversation that a request continues; None if it names none."""
    given = fields.conversation
    if given is None:
        return None
    identifier = given.get("id") if isinstance(given, dict) else given
    if not isinstance(identifier, str) or not identifier:
        raise UsageError("conversation must be the id of a conversation, or an object with this id.")
    if fields.previous_response_id:
        raise UsageError("A request continues a conversation or a response, not both.", "Name one of them.")
    return identifier


def _with_items(given: list[dict[str, Any]], store: ResponseStore) -> list[dict[str, Any]]:
    """The items of a request, those that it refers to among them."""
    places = {place: item["id"] for place, item in enumerate(given) if _refers(item)}
    items = store.items(places.values())
    return [items[places[place]] if place in places else item for place, item in enumerate(given)]


def _refers(item: Mapping[str, Any]) -> bool:
    return isinstance(item.get("id"), str) and (item.get("type") == _REFERENCE or set(item) == {"id"})


def _named_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a request, each with an id, and texts of messages as parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    named = []
    for item in given:
        named.append(item if isinstance(item.get("id"), str) else {**item, "id": f"item_{uuid.uuid4().hex}"})
        if isinstance(item.get("content"), str) and item.get("type") in (None, *_MESSAGES):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            part = {"type": kind, "text": item["content"]}
            named[-1] = {"type": "message", **named[-1], "content": [part]}
    return named


def _messages(name: str, given: str | list[dict[str, Any]], warnings: Warnings) -> list[ChatMessage]:
    if isinstance(given, str) and given:
        return [ChatMessage(role="user", content=given)]
    if not given:
        raise UsageError(f"{name} must be a non-empty string or list of messages.")
    items = [converted(item, Item, f"{name}[{place}]") for place, item in enumerate(given)]
    answered = {item.call_id for item in items if (item.type or "").endswith(_OUTPUT)}
    messages: list[ChatMessage] = []
    thought = ""
    for place, item in enumerate(items):
        kind = item.type or "message"
        if kind == "reasoning":
            thought = text_of(item.content or item.summary, Warnings())
            continue
        if kind in _MESSAGES:
            role = item.role or ("user" if kind == "agent_message" else None)
            if role is None:
                raise UsageError(f'Missing "{name}[{place}].role".')
            messages.append(ChatMessage(role=role, content=item.content))
        elif kind.endswith(_OUTPUT):
            messages.append(_result(item, item.call_id))
        elif kind.endswith(_CALL):
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage(role="assistant", content=""))
            if thought:  # templates show it within a chain of calls; others are left out
                messages[-1].reasoning_content = thought
            identifier = item.call_id or item.id
            _add_call(messages[-1], item, given[place], identifier in answered, warnings)
            if item.output is not None and identifier not in answered:
                messages.append(_result(item, identifier))
        else:
            said = note(f"An item of the type {shown(kind)}", warnings)
            messages.append(ChatMessage(role="assistant", content=said))
        thought = ""
    if not messages:
        raise UsageError(f"The {name} has no messages.")
    return messages


def _result(item: Item, identifier: str | None) -> ChatMessage:
    content = item.tools if item.output is None else item.output
    return ChatMessage(role="tool", tool_call_id=identifier or "", content=content)


def _add_call(
    answer: ChatMessage, item: Item, given: Mapping[str, Any], has_result: bool, warnings: Warnings
) -> None:
    """Add a call to the answer that it is part of: templates show an answer with all its calls.

    Args:
        given: the item as it came.
        has_result: the result of the call is an item of its own.
    """
    kind, identifier = item.type or "", item.call_id or item.id
    name = item.name or kind.removesuffix(_CALL)
    if kind == "function_call":
        call = Call(id=identifier, function=CalledFunction(name, item.arguments))
    elif kind == "custom_tool_call":
        call = Call(id=identifier, custom=CalledTool(name, item.input))
    else:
        rest = {key: value for key, value in given.items() if key not in _ABOUT_CALLS and value is not None}
        if not has_result and not item.output:
            # The API's own servers have run it, and the items do not say what came of it.
            said = f"[{kind}: {json.dumps(rest, ensure_ascii=False)}]" if rest else f"[{kind}]"
            warnings.add(f"An item of the type {shown(kind)} is shown to the model as text.")
            answer.content = "\n".join(filter(None, [text_of(answer.content, warnings), said]))
            return
        call = Call(id=identifier, function=CalledFunction(name, item.arguments or rest))
    answer.tool_calls = [*(answer.tool_calls or ()), call]
