"""The JSON of the OpenAI API: answers, usage, models and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from edgespec.generation.result import Generation


class Reply:
    """Builds the bodies that answer one request, all with the same id.

    Args:
        key: what the id ends with; None for a random one.
    """

    def __init__(self, *, chat: bool, model: str, key: str | None = None) -> None:
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{key or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            text: dict[str, Any] = (
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
                if self._chat
                else {"text": answer.text}
            )
            choices.append({"index": index, **text, "logprobs": None, "finish_reason": _reason(answer)})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage(answers)}

    def first(self, index: int) -> dict[str, Any] | None:
        """The first piece of a streamed chat answer."""
        return self._piece(index, {"role": "assistant", "content": ""}, None) if self._chat else None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A piece of a streamed answer."""
        return self._piece(index, {"content": text} if self._chat else text, None)

    def last(self, index: int, answer: Generation) -> dict[str, Any]:
        """The last piece of a streamed answer."""
        return self._piece(index, {} if self._chat else "", _reason(answer))

    def usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """The usage, as a separate piece without choices."""
        return {**self._head, "object": self._piece_kind, "choices": [], "usage": usage(answers)}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _piece(self, index: int, delta: object, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, ("delta" if self._chat else "text"): delta, "finish_reason": reason}
        return {**self._head, "object": self._piece_kind, "choices": [choice | {"logprobs": None}]}


def usage(answers: Sequence[Generation]) -> dict[str, int]:
    """Tokens read and generated."""
    read, written = answers[0].prompt_tokens if answers else 0, sum(len(a.tokens) for a in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def failure(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models(name: str, started: int) -> dict[str, Any]:
    """The body of the list of models."""
    return {"object": "list", "data": [model(name, started)]}


def model(name: str, started: int) -> dict[str, Any]:
    """The body about one model."""
    return {"id": name, "object": "model", "created": started, "owned_by": "edgespec"}


def _reason(answer: Generation) -> str:
    return "length" if answer.finish_reason == "length" else "stop"
