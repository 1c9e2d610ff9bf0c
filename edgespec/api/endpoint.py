"""The decisions of an API at one of its paths: the form of requests, of answers, and of errors.

Every request is translated to one of the OpenAI API, which `completion_request` checks. So settings have the
same limits in every API.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.api.completion_request import CompletionRequest, TranslatedRequest
from edgespec.api.images import DATA_URL
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal
from edgespec.api.warnings import Warnings
from edgespec.generation.result import Chunk, Generation

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

Event = dict[str, Any]
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
_COMMENT = b": waiting\n\n"


def json_line(event: Event) -> str:
    """An event as JSON in one line, wherever clients end lines.

    Python and JavaScript know characters that end lines besides \\n and \\r.
    """
    return json.dumps(event, ensure_ascii=False).translate(_LINE_ENDS)


class ResponseBuilder(Protocol):
    """Builds the bodies or events that answer one request."""

    def whole(self, answers: Sequence[Generation]) -> Event: ...
    def begin(self, index: int) -> list[Event]: ...
    def piece(self, index: int, chunk: Chunk) -> list[Event]: ...
    def end(self, index: int, answer: Generation) -> list[Event]: ...
    def usage(self, answers: Sequence[Generation]) -> list[Event]: ...


class _EndpointBase(ABC):
    """An endpoint that clients send requests to."""

    @property
    @abstractmethod
    def waits(self) -> bool:
        """True if requests wait for the model, and so take a place in the queue."""

    def failure(self, refusal: Refusal) -> Event:
        """The body of an error."""
        return refusal.body


class DirectEndpoint(_EndpointBase):
    """An endpoint for questions about the model, which it does not answer itself.

    Args:
        reply: makes the answer of a request.
    """

    waits = False

    def __init__(self, reply: Callable[[object, Engine, Limits], Event]) -> None:
        self.reply = reply


class PromptEndpoint(_EndpointBase):
    """An endpoint that answers prompts.

    Attributes:
        media_type: of streamed answers.
        last: what a stream ends with.
        counts: count the prompt's tokens instead of answering it.
        image_hint: how clients send an image.
    """

    media_type = "text/event-stream; charset=utf-8"
    last = b""
    counts = False
    image_hint = DATA_URL

    @property
    def waits(self) -> bool:
        return not self.counts

    @abstractmethod
    def translate(self, body: object, warnings: Warnings) -> TranslatedRequest | Event:
        """Translate the JSON of a request; the answer itself if it needs nothing of the model.

        Args:
            warnings: gets what has no effect.
        """

    @abstractmethod
    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int, context: Any
    ) -> ResponseBuilder:
        """The builder of the answer to a request.

        Args:
            model: the name by which the model was asked for.
            context: that of the translated request.
        """

    def keep_alive(self, body: object) -> float | None:
        """Seconds that a request wants the idle model to stay loaded, negative for ever; None for no wish.

        Raises:
            UsageError: what it wants is no time.
        """
        return None

    def counted(self, prompt_tokens: int) -> Event:
        """The answer of an endpoint that counts tokens."""
        return {"input_tokens": prompt_tokens}

    def frame(self, event: Event) -> bytes:
        """An event of a stream as it is sent."""
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json_line(event)}\n\n".encode()

    def waiting(self, builder: ResponseBuilder) -> bytes:
        """Data sent while there is nothing else, so that neither proxy nor client gives up."""
        return _COMMENT

    def prefill_progress(self, builder: ResponseBuilder, progress: object) -> bytes:
        """Data sent while the prompt is read, ignored by clients that do not look for it.

        Args:
            progress: how far that has come; its text is for people.
        """
        return f": reading the prompt: {progress}\n\n".encode()


Endpoint = DirectEndpoint | PromptEndpoint
