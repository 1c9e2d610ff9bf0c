"""The endpoints of the OpenAI API that answer prompts, and the conversations that `/v1/responses` keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgespec.api import protocol, response_items, responses
from edgespec.api.completion_request import CompletionRequest, TranslatedRequest, translated
from edgespec.api.endpoint import PromptEndpoint, ResponseBuilder
from edgespec.api.messages import Call, CalledFunction, ChatMessage, Message, read_messages
from edgespec.api.refusals import Refusal
from edgespec.api.warnings import Warnings
from edgespec.generation.result import Generation
from edgespec.latest import LatestValues

_MAX_KEPT = 1024
_MAX_BYTES = 64 << 20  # the images of a conversation are kept with it


class ResponseStore:
    """Conversations by the id of the response that they end with, in memory; any thread may use them.

    The least recently used is dropped first.
    """

    def __init__(self) -> None:
        self._kept: LatestValues[bytes] = LatestValues(_MAX_BYTES, _MAX_KEPT)

    def keep(self, identifier: str, asked: bytes, answer: Mapping[str, Any]) -> None:
        """Keep a conversation.

        Args:
            asked: its messages, a list of JSON that is not empty.
            answer: the message that ends it.
        """
        held = b"%s, %s]" % (asked[:-1], json.dumps(answer).encode())
        self._kept.put(identifier, held, len(held))

    def get(self, identifier: str) -> list[Message]:
        """A conversation.

        Raises:
            Refusal: it is not kept.
        """
        held = self._kept.get(identifier)
        if held is None:
            text = f"The response {identifier[:80]!r} is not kept. Send the whole conversation as 'input'."
            raise Refusal(404, text, "previous_response_not_found")
        messages: list[Message] = json.loads(held)
        return messages


class CompletionsEndpoint(PromptEndpoint):
    """`/v1/chat/completions` and `/v1/completions` of the OpenAI API."""

    last = b"data: [DONE]\n\n"

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat

    def translate(self, body: object, warnings: Warnings) -> TranslatedRequest:
        return translated(body, chat=self._chat, warnings=warnings)

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int, context: Any
    ) -> ResponseBuilder:
        return protocol.CompletionBuilder(
            chat=self._chat,
            model=model,
            warnings=request.warnings,
            timed=True,
            speculates=request.with_speculation,
            custom_tools=request.custom_tools,
            n_prompts=len(request.prompts),
            echoed=[prompt for prompt in request.echoed for _ in range(request.answers)],
            scored=request.scores_prompts,
        )


class ResponsesEndpoint(PromptEndpoint):
    """`/v1/responses` of the OpenAI API."""

    def __init__(self) -> None:
        self._store = ResponseStore()

    def translate(self, body: object, warnings: Warnings) -> TranslatedRequest:
        return responses.as_chat(body, warnings, self._store.get)

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int, context: Any
    ) -> ResponseBuilder:
        asked = context.asked

        def keep(identifier: str, answer: Generation) -> None:
            calls = [Call(c.id, CalledFunction(c.name, c.arguments)) for c in answer.tool_calls]
            told = ChatMessage(
                role="assistant",
                content=answer.text,
                tool_calls=calls,
                reasoning_content=answer.reasoning,
            )
            self._store.keep(identifier, asked, *read_messages([told], Warnings()))

        return response_items.ResponsesBuilder(
            model=model,
            config=request.config,
            warnings=request.warnings,
            custom_tools=request.custom_tools,
            previous=context.previous,
            keep=None if asked is None else keep,
        )
