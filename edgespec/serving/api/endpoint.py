"""The decisions of an API at one of its paths: the form of requests, of answers, and of errors.

Every request is translated to one of the OpenAI API, which `completion_request` checks. So settings have the
same limits in every API.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.generation.result import Chunk, Generation
from edgespec.serving.api import protocol, response_items, responses
from edgespec.serving.api.completion_request import CompletionRequest
from edgespec.serving.api.refusals import Refusal

Event = dict[str, Any]
_COMMENT = b": waiting\n\n"


class ResponseBuilder(Protocol):
    """Builds the bodies or events that answer one request."""

    def whole(self, answers: Sequence[Generation]) -> Event: ...
    def begin(self, index: int) -> list[Event]: ...
    def piece(self, index: int, chunk: Chunk) -> list[Event]: ...
    def end(self, index: int, answer: Generation) -> list[Event]: ...
    def usage(self, answers: Sequence[Generation]) -> list[Event]: ...


@dataclass(frozen=True)
class TranslatedRequest:
    """A request as one of the OpenAI API.

    Attributes:
        body: of a chat completion; of a completion, if it is raw.
        raw: the prompt is a text to continue, without a chat template.
        reply: the answer, for a request that needs none of the model's.
    """

    body: object
    raw: bool = False
    reply: Event | None = None


class Endpoint(ABC):
    """A path that answers prompts.

    Attributes:
        media_type: of streamed answers.
        last: what a stream ends with.
        counts: count the prompt's tokens instead of answering it.
    """

    media_type = "text/event-stream; charset=utf-8"
    last = b""
    counts = False

    @abstractmethod
    def translate(self, body: object) -> TranslatedRequest:
        """Translate the JSON of a request.

        Raises:
            UsageError: a field has another form, or is not supported here.
        """

    @abstractmethod
    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int
    ) -> ResponseBuilder:
        """The builder of the answer to a request.

        Args:
            model: the name by which the model was asked for.
        """

    def counted(self, prompt_tokens: int) -> Event:
        """The answer of a path that counts tokens."""
        return {"input_tokens": prompt_tokens}

    def failure(self, refusal: Refusal) -> Event:
        """The body of an error."""
        return refusal.body

    def frame(self, event: Event) -> bytes:
        """An event of a stream as it is sent."""
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()

    def waiting(self, builder: ResponseBuilder) -> bytes:
        """Data sent while there is nothing else, so that neither proxy nor client gives up."""
        return _COMMENT

    def prefill_progress(self, builder: ResponseBuilder, progress: object) -> bytes:
        """Data sent while the prompt is read, ignored by clients that do not look for it.

        Args:
            progress: how far that has come; its text is for people.
        """
        return f": reading the prompt: {progress}\n\n".encode()


class CompletionsEndpoint(Endpoint):
    """`/v1/chat/completions` and `/v1/completions` of the OpenAI API."""

    last = b"data: [DONE]\n\n"

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat

    def translate(self, body: object) -> TranslatedRequest:
        return TranslatedRequest(body, raw=not self._chat)

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int
    ) -> ResponseBuilder:
        return protocol.CompletionBuilder(
            chat=self._chat,
            model=model,
            warnings=request.warnings,
            timed=True,
            speculates=request.with_speculation,
        )


class ResponsesEndpoint(Endpoint):
    """`/v1/responses` of the OpenAI API."""

    def translate(self, body: object) -> TranslatedRequest:
        return TranslatedRequest(responses.as_chat(body))

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int
    ) -> ResponseBuilder:
        return response_items.ResponsesBuilder(model=model, config=request.config, warnings=request.warnings)
