"""The endpoints of the OpenAI API that answer prompts."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from edgespec.api import protocol, response_items, responses
from edgespec.api.completion_request import CompletionRequest, TranslatedRequest, translated
from edgespec.api.endpoint import Event, PromptEndpoint, ResponseBuilder
from edgespec.api.messages import Call, CalledFunction, ChatMessage, read_messages
from edgespec.api.refusals import Refusal
from edgespec.api.response_store import ResponseStore
from edgespec.api.warnings import Warnings
from edgespec.generation.result import Generation


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
            calls_function=request.calls_function,
            n_prompts=len(request.prompts),
            echoed=[prompt for prompt in request.echoed for _ in range(request.answers)],
            scored=request.scores_prompts,
        )


class ResponsesEndpoint(PromptEndpoint):
    """`/v1/responses` of the OpenAI API."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def translate(self, body: object, warnings: Warnings) -> TranslatedRequest:
        return responses.as_chat(body, warnings, self._store)

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int, context: Any
    ) -> ResponseBuilder:
        def keep(response: Event, answer: Generation) -> None:
            if context.conversation is not None:
                with suppress(Refusal):  # it was removed meanwhile
                    items = [*json.loads(context.asked)["input"], *response["output"]]
                    self._store.conversations.add(context.conversation, items)
            if not context.is_kept:
                return
            calls = [Call(c.id, CalledFunction(c.name, c.arguments)) for c in answer.tool_calls]
            told = ChatMessage(
                role="assistant",
                content=answer.text,
                tool_calls=calls,
                reasoning_content=answer.reasoning,
            )
            self._store.keep(response, context.asked, *read_messages([told], Warnings()))

        return response_items.ResponsesBuilder(
            model=model,
            config=request.config,
            warnings=request.warnings,
            custom_tools=request.custom_tools,
            previous=context.previous,
            conversation=context.conversation,
            keep=keep,
        )
