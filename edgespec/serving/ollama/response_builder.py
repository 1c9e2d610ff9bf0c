"""Answers of the Ollama API: one JSON object, or a line of JSON for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from edgespec.api.endpoint import Event
from edgespec.generation.result import Chunk, Generation
from edgespec.generation.tools import CallPiece, ToolCall


class OllamaBuilder:
    """Builds what answers one request.

    Args:
        model: the name of the model in it.
        chat: pieces are messages, as `/api/chat` has them; otherwise texts, as `/api/generate` has them.
        prompt_tokens: tokens of the prompt.
        warnings: what of the request has no effect.
    """

    def __init__(
        self, *, model: str, chat: bool, prompt_tokens: int = 0, warnings: Sequence[str] = ()
    ) -> None:
        self._warnings = warnings
        self._model = model
        self._chat = chat
        self._prompt_tokens = prompt_tokens
        self._call: list[CallPiece] = []  # pieces of the call that is being generated

    def whole(self, answers: Sequence[Generation]) -> Event:
        """The body of an answer that is not streamed."""
        (answer,) = answers
        said = self._said(answer.text, answer.reasoning, answer.tool_calls)
        return self._head() | said | self._ending(answer)

    def begin(self, _index: int) -> list[Event]:
        """Return no lines: a stream begins with its first piece."""
        return []

    def piece(self, _index: int, chunk: Chunk) -> list[Event]:
        """The lines of a piece of a streamed answer. A call is sent when it is complete."""
        calls: list[ToolCall] = []
        for piece in chunk.calls:
            if piece.id:
                calls += self._finished_call()
            self._call.append(piece)
        if not (chunk.text or chunk.reasoning or calls):
            return []
        return [self._head() | self._said(chunk.text, chunk.reasoning, calls) | {"done": False}]

    def end(self, _index: int, answer: Generation) -> list[Event]:
        """The lines that a streamed answer ends with."""
        calls = self._finished_call()
        lines = [self._head() | self._said("", "", calls) | {"done": False}] if calls else []
        return [*lines, self._head() | self._said("", "", []) | self._ending(answer)]

    def usage(self, _answers: Sequence[Generation]) -> list[Event]:
        """Return no lines: the last one has the usage."""
        return []

    def nothing_yet(self) -> Event:
        """A line that says nothing, for the time of waiting."""
        return self._head() | self._said("", "", []) | {"done": False}

    def loaded(self, *, stays: bool) -> Event:
        """The body that answers a request without a prompt, which loads the model, or unloads it."""
        reason = "load" if stays else "unload"
        return self._head() | self._said("", "", []) | {"done": True, "done_reason": reason}

    def _head(self) -> Event:
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat()}

    def _said(self, text: str, thought: str, calls: Sequence[ToolCall]) -> Event:
        said: Event = {"role": "assistant", "content": text} if self._chat else {"response": text}
        if thought:
            said["thinking"] = thought
        if calls:
            said["tool_calls"] = [_call(call) for call in calls]
        return {"message": said} if self._chat else said

    def _finished_call(self) -> list[ToolCall]:
        pieces, self._call = self._call, []
        if not pieces:
            return []
        return [ToolCall(pieces[0].id, pieces[0].name, "".join(piece.arguments for piece in pieces))]

    def _ending(self, answer: Generation) -> Event:
        times = answer.timings
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(times.prefill_s + times.decode_s),
            "load_duration": 0,
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": _nanoseconds(times.prefill_s),
            "eval_count": len(answer.tokens),
            "eval_duration": _nanoseconds(times.decode_s),
            **({"warnings": list(self._warnings)} if self._warnings else {}),
        }


def _call(call: ToolCall) -> Event:
    return {"function": {"name": call.name, "arguments": call.values}}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
