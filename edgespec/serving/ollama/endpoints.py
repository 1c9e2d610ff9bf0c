"""`/api/chat` and `/api/generate`."""

from __future__ import annotations

import json

from edgespec.serving.api.endpoint import Endpoint, Event, Form, Translated
from edgespec.serving.api.refusals import Refusal
from edgespec.serving.api.requests import Request
from edgespec.serving.ollama.reply import Reply
from edgespec.serving.ollama.requests import chat_as_chat, generate_as_chat, only_loads


class Prompts(Endpoint):
    """`/api/chat`, or `/api/generate`.

    Args:
        model: the name that an answer without a prompt gives.
    """

    media_type = "application/x-ndjson"

    def __init__(self, *, chat: bool, model: str) -> None:
        self._chat = chat
        self._model = model

    def translate(self, body: object) -> Translated:
        if only_loads(body, "messages" if self._chat else "prompt"):
            return Translated(body, reply=Reply(model=self._model, chat=self._chat).loaded())
        if self._chat:
            return Translated(chat_as_chat(body))
        request, raw = generate_as_chat(body)
        return Translated(request, raw=raw)

    def form(self, request: Request, *, model: str, prompt_tokens: int) -> Form:
        return Reply(model=model, chat=self._chat, prompt_tokens=prompt_tokens)

    def failure(self, refusal: Refusal) -> Event:
        return failure(refusal)

    def frame(self, event: Event) -> bytes:
        return json.dumps(event, ensure_ascii=False).encode() + b"\n"

    def waiting(self, form: Form) -> bytes:
        assert isinstance(form, Reply)
        return self.frame(form.nothing_yet())

    def reading(self, form: Form, progress: object) -> bytes:
        return self.waiting(form)


def failure(refusal: Refusal) -> Event:
    """The body of an error."""
    return {"error": refusal.message}
