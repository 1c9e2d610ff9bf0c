"""Paths of llama.cpp's server: completions, chat templates, and descriptions of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from edgespec.api import protocol
from edgespec.api.completion_request import CompletionRequest, TranslatedRequest, check_size, translated
from edgespec.api.endpoint import Event, PromptEndpoint, ResponseBuilder
from edgespec.api.fields import Fields, converted, read_fields
from edgespec.api.images import RequestImages
from edgespec.api.limits import Limits
from edgespec.api.messages import ChatMessages, read_messages
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.generation.result import Chunk, Generation
from edgespec.serving.ollama.model_card import ModelCard
from edgespec.version import __version__

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


class TextAround(Struct):
    """The parts of a request to fill in the middle of a text."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""


class TemplateBody(Fields):
    messages: ChatMessages


class NativeEndpoint(PromptEndpoint):
    """`/completion`, or `/infill`.

    Args:
        infill: the prompt is what stands before and behind the answer.
    """

    def __init__(self, *, infill: bool = False) -> None:
        self._infill = infill

    def translate(self, body: object, warnings: Warnings) -> TranslatedRequest:
        if self._infill and isinstance(body, dict):
            around, rest = _around(body)
            body = {**rest, "prompt": around.input_prefix + around.prompt, "suffix": around.input_suffix}
        asked = translated(body, chat=False, warnings=warnings)
        prompt = getattr(asked.fields, "prompt", "")
        if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
            raise UsageError("This path takes one prompt.", "Send several to /v1/completions.")
        if asked.fields.n > 1:
            raise UsageError("This path gives one answer.", "Ask /v1/completions for several.")
        return asked

    def response_builder(
        self, request: CompletionRequest, *, model: str, prompt_tokens: int, context: Any
    ) -> ResponseBuilder:
        return NativeBuilder(model=model, prompt_tokens=prompt_tokens, warnings=request.warnings)


class NativeBuilder:
    """Builds what answers one request; see `ResponseBuilder`.

    Args:
        model: the name of the model in it.
        prompt_tokens: tokens of the prompt.
        warnings: what of the request has no effect.
    """

    def __init__(self, *, model: str, prompt_tokens: int, warnings: Sequence[str]) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._warnings = warnings

    def whole(self, answers: Sequence[Generation]) -> Event:
        """The body of an answer that is not streamed."""
        return self._last(0, answers[0], answers[0].text)

    def begin(self, _index: int) -> list[Event]:
        """Return no events: a stream begins with its first piece."""
        return []

    def piece(self, index: int, chunk: Chunk) -> list[Event]:
        text = chunk.reasoning + chunk.text
        return [{"index": index, "content": text, "tokens": [*chunk.tokens], "stop": False}] if text else []

    def end(self, index: int, answer: Generation) -> list[Event]:
        """The last event of a streamed answer."""
        return [self._last(index, answer, "")]

    def usage(self, _answers: Sequence[Generation]) -> list[Event]:
        """Return no events: the last one has the usage."""
        return []

    def _last(self, index: int, answer: Generation, text: str) -> Event:
        cut = answer.finish_reason == "length"
        return {
            "index": index,
            "content": text,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": self._prompt_tokens,
            "tokens_cached": self._prompt_tokens + len(answer.tokens),
            "truncated": False,
            "stop_type": "limit" if cut else "word" if answer.stop_string else "eos",
            "stopping_word": answer.stop_string or "",
            "timings": protocol.timings([answer]),
            **({"warnings": list(self._warnings)} if self._warnings else {}),
        }


def with_template(body: object, engine: Engine, limits: Limits) -> Event:
    """The prompt that the chat template makes of messages.

    Raises:
        UsageError: there are no messages, or they have another form.
        ContextLengthError: they are far longer than the context.
        TemplateError: the chat template does not take them.
    """
    warnings = Warnings()
    given = read_fields(body, TemplateBody, warnings).messages
    images = RequestImages(limits, warnings, lambda: False)
    messages: Any = images.read(read_messages(given, warnings))
    vocabulary = engine.target.model.vocabulary
    check_size(messages, context=engine.context, n_vocab=vocabulary.n_tokens, limits=limits)
    tokens = engine.encoder.encode(messages)
    said = b"".join(vocabulary.piece(token, control=True) for token in tokens)
    return {"prompt": said.decode("utf-8", "replace")}


def properties(card: ModelCard, parallel: int) -> Event:
    """The body of `/props`."""
    return {
        "default_generation_settings": {"n_ctx": card.context},
        "total_slots": parallel,
        "model_path": card.name,
        "modalities": {"vision": card.sees, "audio": False},
        "build_info": f"edgespec {__version__}",
    }


def slots(card: ModelCard, parallel: int, running: int) -> list[Event]:
    return [
        {"id": slot, "n_ctx": card.context, "speculative": True, "is_processing": slot < running}
        for slot in range(parallel)
    ]


def _around(body: dict[str, Any]) -> tuple[TextAround, dict[str, Any]]:
    """The text around the answer, and the other fields of a request."""
    names = TextAround.__struct_fields__
    around = converted({name: body[name] for name in names if body.get(name) is not None}, TextAround)
    return around, {name: value for name, value in body.items() if name not in names}
