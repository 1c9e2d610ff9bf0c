"""Answers of the Messages API: thoughts, text and calls as blocks of content, whole or streamed."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

from edgespec.api.endpoint import Event
from edgespec.generation.result import Chunk, Generation
from edgespec.generation.tools import CallPiece

PING: Event = {"type": "ping"}


class MessageBuilder:
    """Builds the message that answers one request, whole or as events.

    Args:
        model: the name of the model in it.
        prompt_tokens: tokens of the prompt, which a stream reports before the answer.
        warnings: what of the request has no effect.
    """

    def __init__(self, *, model: str, prompt_tokens: int, warnings: Sequence[str] = ()) -> None:
        self._head: Event = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._warnings = warnings
        self._prompt_tokens = prompt_tokens
        self._open = ""  # the type of the block that is being streamed
        self._count = 0  # blocks that were begun
        self._thought: list[str] = []

    def whole(self, answers: Sequence[Generation]) -> Event:
        """The body of an answer that is not streamed."""
        (answer,) = answers
        content: list[Event] = []
        if answer.reasoning:
            thought = answer.reasoning
            content.append({"type": "thinking", "thinking": thought, "signature": _signature(thought)})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        content += [_tool_use(call.id, call.name, call.values) for call in answer.tool_calls]
        return {
            **self._head,
            **self._notes,
            "content": content,
            **_ending(answer),
            "usage": _usage(answer),
        }

    def begin(self, _index: int) -> list[Event]:
        """The events that a streamed answer begins with."""
        # What is cached of the prompt is not known before it is the request's turn; the last event says it.
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head, **self._notes, "content": [], **ending, "usage": usage}
        return [{"type": "message_start", "message": message}, PING]

    def piece(self, _index: int, chunk: Chunk) -> list[Event]:
        """The events of a piece of a streamed answer."""
        events: list[Event] = []
        if chunk.reasoning:
            self._thought.append(chunk.reasoning)
            events += self._in_block({"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta(type="thinking_delta", thinking=chunk.reasoning))
        if chunk.text:
            events += self._in_block({"type": "text", "text": ""})
            events.append(self._delta(type="text_delta", text=chunk.text))
        for call in chunk.calls:
            events += self._called(call)
        return events

    def end(self, _index: int, answer: Generation) -> list[Event]:
        changed = {"type": "message_delta", "delta": _ending(answer), "usage": _usage(answer)} | self._notes
        return [*self._close(), changed, {"type": "message_stop"}]

    def usage(self, _answers: Sequence[Generation]) -> list[Event]:
        """Return no events: the last ones have the usage."""
        return []

    @property
    def _notes(self) -> Event:
        """The warnings so far; calls may add some."""
        return {"warnings": list(self._warnings)} if self._warnings else {}

    def _called(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.id:
            events += [*self._close(), self._begin(_tool_use(piece.id, piece.name, {}))]
        if piece.arguments:
            events.append(self._delta(type="input_json_delta", partial_json=piece.arguments))
        return events

    def _in_block(self, block: Event) -> list[Event]:
        """The events that begin a block, unless one of its type is open."""
        if self._open == block["type"]:
            return []
        return [*self._close(), self._begin(block)]

    def _begin(self, block: Event) -> Event:
        self._open = block["type"]
        self._count += 1
        return {"type": "content_block_start", "index": self._count - 1, "content_block": block}

    def _delta(self, **delta: Any) -> Event:
        return {"type": "content_block_delta", "index": self._count - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        events: list[Event] = []
        if self._open == "thinking":
            signature = _signature("".join(self._thought))
            events.append(self._delta(type="signature_delta", signature=signature))
            self._thought = []
        self._open = ""
        return [*events, {"type": "content_block_stop", "index": self._count - 1}]


def _tool_use(identifier: str, name: str, arguments: object) -> Event:
    return {"type": "tool_use", "id": identifier, "name": name, "input": arguments}


def _signature(thought: str) -> str:
    """A value that clients pass back with the thought; nothing here needs it."""
    return hashlib.sha256(thought.encode()).hexdigest()


def _usage(answer: Generation) -> Event:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": len(answer.tokens),
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
    }


def _ending(answer: Generation) -> Event:
    reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(answer.finish_reason, "end_turn")
    if answer.context_full:
        reason = "model_context_window_exceeded"
    elif answer.stop_string and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_string or None}
