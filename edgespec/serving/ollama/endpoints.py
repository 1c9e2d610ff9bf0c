"""`/api/chat` and `/api/generate`."""

from __future__ import annotations

from typing import Any

from edgespec.api.completion_request import CompletionRequest, TranslatedRequest
from edgespec.api.endpoint import (
    Event,
    PromptEndpoint,
    ResponseBuilder,
    json_line,
)
from edgespec.api.refusals import Refusal
from edgespec.api.warnings import Warnings
from edgespec.serving.keep_alive import parse_keep_alive
from edgespec.serving.ollama.response_builder import OllamaBuilder
from edgespec.serving.ollama.translation import chat_as_chat, generate_as_chat


class OllamaEndpoint(PromptEndpoint):
    """`/api/chat`, or `/api/generate`.

    Args:
        model: the name that an answer without a prompt gives.
    """

    media_type = "application/x-ndjson"
    image_hint = 'Send its data in Base64, in "images".'

    def __init__(self, *, chat: bool, model: str) -> None:
        self._chat = chat
        self._model = model

    def translate(self, body: object, warnings: Warnings) -> TranslatedRequest | Event:
        asked = (chat_as_chat if self._chat else generate_as_chat)(body, warnings)
        stays = self.keep_alive(body) != 0
        return asked or OllamaBuilder(model=self._model, chat=self._chat).loaded(stays=stays)

    def keep_alive(self, body: object) -> float | None:
        asked = body.get("keep_alive") if isinstance(body, dict) else None
        return None if asked is None else parse_keep_alive(asked)

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int, context: Any
    ) -> ResponseBuilder:
        return OllamaBuilder(
            model=model, chat=self._chat, prompt_tokens=prompt_tokens, warnings=request.warnings
        )

    def failure(self, refusal: Refusal) -> Event:
        return failure(refusal)

    def frame(self, event: Event) -> bytes:
        return json_line(event).encode() + b"\n"

    def waiting(self, builder: ResponseBuilder) -> bytes:
        assert isinstance(builder, OllamaBuilder)
        return self.frame(builder.nothing_yet())

    def prefill_progress(self, builder: ResponseBuilder, progress: object) -> bytes:
        return self.waiting(builder)


def failure(refusal: Refusal) -> Event:
    """The body of an error."""
    return {"error": refusal.message}
