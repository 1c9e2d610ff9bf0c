"""The Responses API (`/v1/responses`): text in, text out, streamed or whole; nothing is stored.

A request is turned into one for a chat, and what the model thinks and says into items of output.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from edgespec.errors import UsageError
from edgespec.generation.result import Chunk, Generation
from edgespec.serving import protocol
from edgespec.serving.requests import CHAT_FIELDS
from edgespec.serving.values import shown, wrong

Event = dict[str, Any]

# Fields with the name and meaning that they have in a request for a chat.
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "think", "stop", "penalty_window"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty", "grammar", "json_schema"),
    *("user", "metadata", "store"),
)
_INSTEAD = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
_INSTEAD |= {"max_completion_tokens": "max_output_tokens", "response_format": "text"}
_INSTEAD |= {"reasoning_effort": "reasoning"}
# These would change the answer, or what can be done with it later.
_UNSUPPORTED = {
    "previous_response_id": "Responses are not stored, so going on with one is",
    "conversation": "Responses are not stored, so conversations are",
    "background": "Answering in the background is",
    "include": "Including more output is",
    "top_logprobs": "Log-probabilities are served at /v1/chat/completions; here they are",
    "tools": "Tools are served at /v1/chat/completions; here they are",
}
_OTHERS = ("input", "instructions", "max_output_tokens", "text", "reasoning", "tool_choice")
_WITHOUT_EFFECT = (
    *("parallel_tool_calls", "truncation", "service_tier", "safety_identifier", "max_tool_calls"),
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
    messages = _messages(body.get("input"))
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise wrong("instructions", instructions, "a text")
        messages.insert(0, {"role": "system", "content": instructions})
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": messages, "max_tokens": body.get("max_output_tokens")}
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


class Reply:
    """Builds what answers one request: the same interface as `protocol.Reply`.

    Args:
        model: the name of the model in it.
        warnings: what of the request has no effect.
    """

    def __init__(self, *, model: str, warnings: Sequence[str] = ()) -> None:
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": None,
            "top_p": None,
            **({"warnings": list(warnings)} if warnings else {}),
        }
        self._ids = {kind: f"{kind}_{uuid.uuid4().hex}" for kind in ("rs", "msg")}
        self._sequence = 0
        self._open = ""  # the kind of item that is being streamed
        self._said = {"rs": "", "msg": ""}
        self._items: list[Event] = []

    def whole(self, answers: Sequence[Generation]) -> Event:
        """The body of an answer that is not streamed."""
        (answer,) = answers
        items = [self._item("rs", answer.reasoning)] if answer.reasoning else []
        return self._finished(answer, [*items, self._item("msg", answer.text)])

    def begin(self, _index: int) -> list[Event]:
        """What a streamed answer begins with."""
        response = {**self._head, "status": "in_progress", "output": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def piece(self, _index: int, chunk: Chunk) -> list[Event]:
        """A piece of a streamed answer."""
        events: list[Event] = []
        for kind, text in (("rs", chunk.reasoning), ("msg", chunk.text)):
            if text:
                events += self._begin_item(kind)
                self._said[kind] += text
                events.append(self._of_part(f"{_PART_EVENTS[kind]}.delta", delta=text))
        return events

    def end(self, _index: int, answer: Generation) -> list[Event]:
        """What a streamed answer ends with."""
        events = [*([] if self._said["msg"] else self._begin_item("msg")), *self._end_item()]
        response = self._finished(answer, self._items)
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=response)]

    def usage(self, _answers: Sequence[Generation]) -> list[Event]:
        """Nothing: the last event has the usage."""
        return []

    def _finished(self, answer: Generation, items: Sequence[Event]) -> Event:
        cut = answer.finish_reason == "length"
        counts = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": len(answer.tokens),
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + len(answer.tokens),
        }
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(items),
            "usage": counts,
            "timings": protocol.timings([answer]),
        }

    def _item(self, kind: str, text: str, status: str = "completed") -> Event:
        content = [_part(kind, text)] if text or status == "completed" else []
        if kind == "rs":
            return {"id": self._ids[kind], "type": "reasoning", "summary": [], "content": content}
        return {
            "id": self._ids[kind],
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _begin_item(self, kind: str) -> list[Event]:
        if self._open == kind:
            return []
        events = self._end_item()
        self._open = kind
        item = self._item(kind, "", "in_progress")
        place = len(self._items)
        events.append(self._event("response.output_item.added", output_index=place, item=item))
        events.append(self._of_part("response.content_part.added", part=_part(kind, "")))
        return events

    def _end_item(self) -> list[Event]:
        kind = self._open
        if not kind:
            return []
        self._open = ""
        place, said = len(self._items), self._said[kind]
        self._items.append(self._item(kind, said))
        at = {"item_id": self._ids[kind], "output_index": place, "content_index": 0}
        more: Event = {"logprobs": []} if kind == "msg" else {}
        return [
            self._event(f"{_PART_EVENTS[kind]}.done", **at, text=said, **more),
            self._event("response.content_part.done", **at, part=_part(kind, said)),
            self._event("response.output_item.done", output_index=place, item=self._items[place]),
        ]

    def _of_part(self, name: str, **more: Any) -> Event:
        if name == "response.output_text.delta":
            more["logprobs"] = []
        place = {"item_id": self._ids[self._open], "output_index": len(self._items), "content_index": 0}
        return self._event(name, **place, **more)

    def _event(self, name: str, **more: Any) -> Event:
        event = {"type": name, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return event


_PART_EVENTS = {"rs": "response.reasoning_text", "msg": "response.output_text"}


def _part(kind: str, text: str) -> Event:
    if kind == "rs":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(value: object) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UsageError("The input is not a text or a list of messages, or empty.")
    messages = []
    for item in value:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            continue  # earlier thoughts are left out
        if kind != "message":
            raise UsageError(
                f"The input has an item of the kind {shown(kind)}.", "Only messages are supported."
            )
        content = item.get("content")
        if isinstance(content, list):
            content = [_text(part) for part in content]
        messages.append({"role": item.get("role"), "content": content})
    if not messages:
        raise UsageError("The input has no messages.")
    return messages


def _text(part: object) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    raise UsageError("A part of the input is not text.", "Only text is supported.")


def _form(value: object) -> dict[str, Any] | None:
    """The format of the answer, as a request for a chat has it."""
    if not isinstance(value, dict | None):
        raise wrong("text", value, "an object")
    form = (value or {}).get("format")
    if not isinstance(form, dict | None):
        raise wrong("text.format", form, "an object")
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema", {})}}
