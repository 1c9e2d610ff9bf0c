"""Requests of the Ollama API, translated to requests for a chat or a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from edgespec.api.completion_request import CompletionFields, TextBody, TranslatedRequest
from edgespec.api.contents import data_address, image_part, parts_of
from edgespec.api.fields import read_fields
from edgespec.api.formats import ResponseFormat
from edgespec.api.messages import ChatMessage, read_messages
from edgespec.api.settings import Sampling, Settings
from edgespec.api.tools import ToolDefinition
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

_FieldsT = TypeVar("_FieldsT", bound=CompletionFields)
_OWN_TEMPLATE = "The model's own chat template is used, and nothing is kept between prompts."
_LOGPROBS = "Use /v1/chat/completions for log-probabilities."


class Options(Sampling):
    """The options of a request; others tune Ollama's own engine."""

    without_effect: ClassVar[tuple[str, ...]] = (
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock"),
        *("low_vram", "f16_kv", "vocab_only", "num_keep", "logits_all", "embedding_only"),
    )


class OllamaFields(Settings):
    """The fields that requests to both paths have."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "logprobs": _LOGPROBS,
        "top_logprobs": _LOGPROBS,
        **dict.fromkeys(("width", "height", "steps"), "Answers are text."),
    }
    without_effect: ClassVar[tuple[str, ...]] = ("keep_alive",)  # read by the endpoint

    stream: bool = True
    options: dict[str, Any] | None = None
    format: Annotated[Literal["json", ""] | dict[str, Any], Meta(description='"json" or a JSON schema')] = ""

    def translated(self, kind: type[_FieldsT], warnings: Warnings, **more: Any) -> _FieldsT:
        """These fields in a request of the OpenAI API, with options instead of them, and more."""
        options = read_fields(self.options or {}, Options, warnings, "options").given()
        more |= {name: value for name, value in options.items() if (name, value) != ("max_tokens", 0)}
        if self.format == "json":
            more["response_format"] = ResponseFormat(type="json_object")
        elif self.format != "":
            more["response_format"] = ResponseFormat(type="json_schema", schema=self.format)
        return self.as_kind(kind, **more)


class OllamaMessage(ChatMessage):
    thinking: str | None = None
    images: list[Any] | None = None
    tool_name: str | None = None


class OllamaChatBody(OllamaFields):
    messages: Sequence[OllamaMessage] = ()
    tools: Sequence[ToolDefinition] = ()


class GenerateBody(OllamaFields):
    unsupported: ClassVar[Mapping[str, str]] = {
        **OllamaFields.unsupported,
        "template": _OWN_TEMPLATE,
        "context": _OWN_TEMPLATE,
    }

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: Sequence[Any] = ()


def chat_as_chat(body: object, warnings: Warnings) -> TranslatedRequest | None:
    """The request for a chat that a request to `/api/chat` stands for.

    Returns:
        None if it only wants the model to be loaded, which it is: there are no messages.
    """
    fields = read_fields(body, OllamaChatBody, warnings)
    if not fields.messages:
        return None
    waiting: list[str] = []  # ids of calls whose results have not come yet
    for place, message in enumerate(fields.messages):
        message.content = _content(message.images, message.content)
        message.reasoning_content = message.reasoning_content or message.thinking
        # This API has no ids for calls and results, but keeps them in order.
        for index, call in enumerate(message.tool_calls or ()):
            call.id = f"call_{place}_{index}"
        if message.tool_calls:
            waiting = [call.id or "" for call in message.tool_calls]
        if message.role == "tool":
            message.name = message.tool_name or message.name
            message.tool_call_id = waiting.pop(0) if waiting else None
    chat = fields.translated(CompletionFields, warnings)
    return TranslatedRequest(chat, read_messages(fields.messages, warnings), warnings)


def generate_as_chat(body: object, warnings: Warnings) -> TranslatedRequest | None:
    """The request for a chat that a request to `/api/generate` stands for; for a completion if it is raw.

    Returns:
        None if it only wants the model to be loaded, which it is: there is no prompt.
    """
    fields = read_fields(body, GenerateBody, warnings)
    if not fields.prompt:
        return None
    if fields.raw or fields.suffix:
        if fields.images:
            raise UsageError(
                "Images are shown in conversations only, not in raw prompts or before a suffix.",
                'Leave out "raw" and "suffix", or the images.',
            )
        return TranslatedRequest(fields.translated(TextBody, warnings, prompt=fields.prompt), None, warnings)
    told = [ChatMessage(role="system", content=fields.system)] if fields.system else []
    told.append(ChatMessage(role="user", content=_content(fields.images, fields.prompt)))
    chat = fields.translated(CompletionFields, warnings)
    return TranslatedRequest(chat, read_messages(told, warnings), warnings)


def _content(images: Sequence[Any] | None, said: object) -> object:
    """The content of a message: its images, which are in Base64, and what is said of them."""
    return [*(image_part(data_address(image)) for image in images or ()), *parts_of(said)]
