"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from edgespec.api.completion_request import CompletionRequest, TranslatedRequest
from edgespec.api.endpoint import Event, PromptEndpoint, ResponseBuilder
from edgespec.api.refusals import Refusal
from edgespec.api.warnings import Warnings
from edgespec.serving.anthropic.message_builder import PING, MessageBuilder
from edgespec.serving.anthropic.translation import as_chat

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesEndpoint(PromptEndpoint):
    """`/v1/messages`, or its `count_tokens`.

    Args:
        counts: count the prompt's tokens instead of answering it.
    """

    image_hint = 'Send it in Base64: a "source" of the type "base64" with its "data".'

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts

    def translate(self, body: object, warnings: Warnings) -> TranslatedRequest:
        return as_chat(body, warnings, counts=self.counts)

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int, context: Any
    ) -> ResponseBuilder:
        return MessageBuilder(model=model, prompt_tokens=prompt_tokens, warnings=request.warnings)

    def failure(self, refusal: Refusal) -> Event:
        message = refusal.message
        if refusal.code == "context_length_exceeded":  # clients look for these words, and compact
            message = f"prompt is too long: {message}"
        kind = _ERRORS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def waiting(self, builder: ResponseBuilder) -> bytes:
        return self.frame(PING)

    def prefill_progress(self, builder: ResponseBuilder, progress: object) -> bytes:
        return self.waiting(builder)
