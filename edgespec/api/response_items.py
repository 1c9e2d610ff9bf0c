"""Answers of the Responses API: thoughts, messages and calls as items of output, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from edgespec.api import protocol
from edgespec.api.tools import custom_input
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, Generation
from edgespec.generation.tools import CHOICES, CallPiece, Tool

Event = dict[str, Any]
# What ids begin with: reasoning, message, function call, call of a custom tool.
_Kind = Literal["rs", "msg", "fc", "ctc"]
_EVENTS = {
    "rs": "response.reasoning_text",
    "msg": "response.output_text",
    "fc": "response.function_call_arguments",
    "ctc": "response.custom_tool_call_input",
}
_CALLS = ("fc", "ctc")


class ResponsesBuilder:
    """Builds what answers one request: the same interface as `protocol.CompletionBuilder`.

    Args:
        model: the name of the model in it.
        warnings: what of the request has no effect.
        config: the settings in force.
        custom_tools: names of tools that take a text.
        previous, conversation: the id of the response or conversation that is continued; None if none is.
        keep: called with the whole response and the answer.
    """

    def __init__(
        self,
        *,
        model: str,
        config: GenerationConfig,
        warnings: Sequence[str] = (),
        custom_tools: Collection[str] = (),
        previous: str | None = None,
        conversation: str | None = None,
        keep: Callable[[Event, Generation], None] | None = None,
    ) -> None:
        self._head: Event = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "previous_response_id": previous,
            "conversation": None if conversation is None else {"id": conversation},
            "metadata": {},
            "parallel_tool_calls": config.parallel_tool_calls,
            "tool_choice": _choice(config.tool_choice),
            "tools": [_definition(tool, tool.name in custom_tools) for tool in config.tools],
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        self._warnings = warnings
        self._custom_tools = custom_tools
        self._keep = keep
        self._sequence = 0
        self._items: list[OutputItem] = []  # the last one may be open

    def whole(self, answers: Sequence[Generation]) -> Event:
        """The body of an answer that is not streamed."""
        (answer,) = answers
        items = [OutputItem("rs", answer.reasoning)] if answer.reasoning else []
        if answer.text or not answer.tool_calls:
            items.append(OutputItem("msg", answer.text))
        items += [
            OutputItem(self._kind_of(call.name), call.arguments, call.id, call.name)
            for call in answer.tool_calls
        ]
        return self._finished(answer, items)

    def begin(self, _index: int) -> list[Event]:
        """Return the beginning of a streamed answer."""
        response = {**self._head, **self._notes, "status": "in_progress", "output": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def piece(self, _index: int, chunk: Chunk) -> list[Event]:
        events: list[Event] = []
        if chunk.reasoning:
            events += self._said("rs", chunk.reasoning)
        if chunk.text:
            events += self._said("msg", chunk.text)
        for call in chunk.calls:
            events += self._called(call)
        return events

    def end(self, _index: int, answer: Generation) -> list[Event]:
        events = []
        if not any(item.kind != "rs" for item in self._items):
            events += self._begin(OutputItem("msg"))
        last = "incomplete" if answer.finish_reason == "length" else "completed"
        events += self._close(last)
        response = self._finished(answer, self._items)
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=response)]

    def usage(self, _answers: Sequence[Generation]) -> list[Event]:
        """Nothing: the last event has the usage."""
        return []

    def _finished(self, answer: Generation, items: Sequence[OutputItem]) -> Event:
        cut = answer.finish_reason == "length"
        states = ["completed"] * (len(items) - 1) + ["incomplete" if cut else "completed"]
        counts = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": len(answer.tokens),
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + len(answer.tokens),
        }
        response = {
            **self._head,
            **self._notes,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item.to_json(state) for item, state in zip(items, states, strict=True)],
            "usage": counts,
            "timings": protocol.timings([answer]),
        }
        if self._keep is not None:
            self._keep(response, answer)
        return response

    @property
    def _notes(self) -> Event:
        """The warnings so far; calls may add some."""
        return {"warnings": list(self._warnings)} if self._warnings else {}

    def _said(self, kind: _Kind, text: str) -> list[Event]:
        """Extend a thought or a message."""
        events = [] if self._open is not None and self._open.kind == kind else self._begin(OutputItem(kind))
        return [*events, self._more(text)]

    def _called(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.id:
            kind = self._kind_of(piece.name)
            events = self._begin(OutputItem(kind, call_id=piece.id, name=piece.name))
        if piece.arguments and self._items[-1].kind == "ctc":
            self._items[-1].text += piece.arguments  # JSON, of which clients get the text when it is whole
            return events
        return [*events, self._more(piece.arguments)] if piece.arguments else events

    def _kind_of(self, name: str) -> _Kind:
        return "ctc" if name in self._custom_tools else "fc"

    @property
    def _open(self) -> OutputItem | None:
        return self._items[-1] if self._items and not self._items[-1].closed else None

    def _more(self, text: str) -> Event:
        item = self._items[-1]
        item.text += text
        more: Event = {"logprobs": []} if item.kind == "msg" else {}
        return self._event(f"{_EVENTS[item.kind]}.delta", **self._place(), delta=text, **more)

    def _begin(self, item: OutputItem) -> list[Event]:
        events = self._close()
        self._items.append(item)
        place = {"output_index": len(self._items) - 1}
        events.append(self._event("response.output_item.added", **place, item=item.to_json("in_progress")))
        if item.kind not in _CALLS:
            events.append(self._event("response.content_part.added", **self._place(), part=item.part()))
        return events

    def _close(self, state: str = "completed") -> list[Event]:
        item = self._open
        if item is None:
            return []
        item.closed = True
        place = self._place()
        done = f"{_EVENTS[item.kind]}.done"
        if item.kind == "fc":
            events = [self._event(done, **place, name=item.name, arguments=item.text)]
        elif item.kind == "ctc":
            said = custom_input(item.text)
            events = [
                self._event(f"{_EVENTS['ctc']}.delta", **place, delta=said),
                self._event(done, **place, input=said),
            ]
        else:
            more: Event = {"logprobs": []} if item.kind == "msg" else {}
            events = [
                self._event(done, **place, text=item.text, **more),
                self._event("response.content_part.done", **place, part=item.part()),
            ]
        index = place["output_index"]
        ended = self._event("response.output_item.done", output_index=index, item=item.to_json(state))
        return [*events, ended]

    def _place(self) -> Event:
        """The place of the last item."""
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind in _CALLS else place | {"content_index": 0}

    def _event(self, name: str, /, **more: Any) -> Event:
        event = {"type": name, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return event


class OutputItem:
    """An item of output: a thought, a message or a call.

    Attributes:
        text: so far; of a call, its arguments.
        closed: nothing is added any more.
    """

    def __init__(self, kind: _Kind, text: str = "", call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.text = text
        self.call_id = call_id
        self.name = name
        self.id = f"{kind}_{uuid.uuid4().hex}"
        self.closed = False

    def to_json(self, status: str) -> Event:
        """The item as the API has it: `status` is "in_progress", "completed" or "incomplete"."""
        if self.kind == "fc":
            called = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {"id": self.id, "type": "function_call", "status": status, **called}
        if self.kind == "ctc":
            called = {"call_id": self.call_id, "name": self.name, "input": custom_input(self.text)}
            return {"id": self.id, "type": "custom_tool_call", "status": status, **called}
        content = [self.part()] if self.text or status != "in_progress" else []
        if self.kind == "rs":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content}
        about = {"type": "message", "role": "assistant", "status": status}
        return {"id": self.id, **about, "content": content}

    def part(self) -> Event:
        """The content of a thought or a message."""
        if self.kind == "rs":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


def _choice(choice: str) -> str | Event:
    return choice if choice in CHOICES else {"type": "function", "name": choice}


def _definition(tool: Tool, custom: bool) -> Event:
    if custom:
        return {"type": "custom", "name": tool.name, "description": tool.description}
    about = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", **about, "strict": True}  # arguments always fit the schema
