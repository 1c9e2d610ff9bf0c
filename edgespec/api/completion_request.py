"""Requests of the OpenAI API: untrusted JSON to what the engine takes, or the reason for refusing it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, Struct

from edgespec.api.fields import read_fields
from edgespec.api.formats import ResponseFormat, read_format
from edgespec.api.images import RequestImages, blind
from edgespec.api.limits import Limits
from edgespec.api.messages import ChatMessages, Message, name_results, read_messages, texts_of
from edgespec.api.settings import Logprobs, n_logprobs
from edgespec.api.text_logprobs import EchoedPrompt
from edgespec.api.tools import SettingsWithTools, read_tools
from edgespec.api.warnings import Warnings, shown
from edgespec.errors import ContextLengthError, UsageError
from edgespec.generation.config import MAX_SEED, GenerationConfig

if TYPE_CHECKING:
    from edgespec.text.encoding import Prompt

_MAX_ANSWERS = 128
_TAG = ":latest"  # of a model's name, which Ollama's clients add


@dataclass(frozen=True)
class CompletionRequest:
    chat: bool  # the prompts are messages to answer; otherwise texts to continue
    prompts: tuple[Prompt, ...]  # what is to be answered; several texts, or one conversation
    config: GenerationConfig
    answers: int  # how many to each
    stream: bool
    with_usage: bool  # the last piece of a stream reports the usage
    with_speculation: bool = False  # the pieces of a stream report what was drafted and accepted
    # The name by which the model was asked for; empty if it was not named, or by an unknown name
    model: str = ""
    warnings: Sequence[str] = ()  # what of the request has no effect, in sentences
    custom_tools: frozenset[str] = frozenset()  # names of tools that take a text
    calls_function: bool = False  # a call is answered as `function_call`
    suffix: str = ""  # what stands behind the completion
    continues: bool = False  # the last message is the beginning of the answer
    # The prompt stands in front of the answer, with its log-probabilities if those are wanted
    echo: bool = False
    echoed: tuple[EchoedPrompt, ...] = ()  # these prompts, once they are tokens

    @property
    def scores_prompts(self) -> bool:
        """True if the log-probabilities of the prompts' tokens are wanted."""
        return self.echo and self.config.logprobs is not None

    @property
    def prompt(self) -> Prompt:
        return self.prompts[0]


Texts = Annotated[
    str | list[str | int | list[int]],
    Meta(description="a non-empty string or list of tokens, or a list of these"),
]
_Answers = Annotated[int, Meta(ge=1, le=_MAX_ANSWERS)]


class StreamOptions(Struct):
    """The parts of a stream that are sent only if they are asked for."""

    include_usage: bool | None = None


class CompletionFields(SettingsWithTools):
    """The fields of requests for chats and for completions; those of the other are declared unsupported."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "audio": "Answers are text.",
        "modalities": "Answers are text.",
        "web_search_options": "Nothing is searched here.",
        "moderation": "Answers are not moderated.",
        "verbosity": "Ask for the length in the prompt.",
    }
    without_effect: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "prediction", "cache_prompt", "id_slot"),
        *("timings_per_token", "return_progress", "guided_decoding_backend"),
    )

    n: _Answers = 1
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | Logprobs | None = None
    top_logprobs: Logprobs | None = None
    speculation: bool = False
    continue_final_message: bool | None = None
    add_generation_prompt: bool = False
    suffix: str = ""
    echo: bool = False


class ChatBody(CompletionFields, kw_only=True):
    unsupported: ClassVar[Mapping[str, str]] = {
        **CompletionFields.unsupported,
        "prompt": "This path takes messages.",
        "suffix": "It is for completions.",
        "echo": "It is for completions.",
    }

    messages: ChatMessages


class TextBody(CompletionFields, kw_only=True):
    unsupported: ClassVar[Mapping[str, str]] = {
        **CompletionFields.unsupported,
        "messages": "This path takes a prompt.",
        "tools": "Tools are for chats.",
        "functions": "Tools are for chats.",
    }

    prompt: Texts


@dataclass(frozen=True)
class TranslatedRequest:
    """A request of any API, as one of the OpenAI API."""

    fields: CompletionFields  # its fields; a `TextBody` unless it is for a chat
    messages: list[Message] | None  # of a chat; their images are not read yet
    warnings: Warnings  # what of it has no effect; more are added
    context: Any = None  # what the endpoint needs to build the response, besides the request


def translated(
    body: object, *, chat: bool, warnings: Warnings | None = None, strict: bool = False
) -> TranslatedRequest:
    """The body of a request of the OpenAI API.

    Args:
        strict: refuse a field whose name is nearly that of another one, instead of a warning.
    """
    warnings = warnings or Warnings()
    if not chat:
        return TranslatedRequest(read_fields(body, TextBody, warnings, strict=strict), None, warnings)
    fields = read_fields(body, ChatBody, warnings, strict=strict)
    return TranslatedRequest(fields, read_messages(fields.messages, warnings), warnings)


def read_request(
    asked: TranslatedRequest,
    defaults: GenerationConfig,
    *,
    model: str,
    aliases: Collection[str] = (),
    limits: Limits | None = None,
    images: RequestImages | None = None,
) -> CompletionRequest:
    """The request for the engine.

    Args:
        defaults: settings for what it leaves open.
        model: the model's name.
        aliases: its other names, which may be patterns such as "claude-*".
        images: reads those of the request; without it, they become notes.
    """
    limits, fields, warnings = limits or Limits(), asked.fields, asked.warnings
    named = model_name(fields.model, (model, *aliases), warnings)
    if fields.best_of not in (None, fields.n):
        warnings.ignored("best_of", "Answers are not compared.")
    chat = asked.messages is not None
    logprobs = n_logprobs(fields.logprobs, fields.top_logprobs if chat else None)
    config = fields.config(defaults, limits, warnings).with_(logprobs=logprobs)
    custom: frozenset[str] = frozenset()
    if chat:
        tools, custom = read_tools(fields, limits, warnings)
        config = config.with_(**tools)
    grammar = read_format(fields, fields.response_format, limits)
    if grammar is not None:
        config = config.with_(grammar=grammar)
        if config.offers_tools and config.tool_choice != "auto":
            warnings.ignored("the format of the answer", "tool_choice requires a call.")
    prompts: tuple[Prompt, ...]
    continues = False
    if asked.messages is None:
        assert isinstance(fields, TextBody), "or there are messages"
        prompts = _text_prompts(fields)
    else:
        if len(asked.messages) > limits.messages:
            text = f"There are {len(asked.messages):,} messages."
            raise UsageError(text, f"At most {limits.messages:,} are allowed.")
        images = images or RequestImages(limits, warnings, blind)
        messages = images.read(asked.messages)
        name_results(messages)
        prompts, continues = (messages,), _continues(fields, messages)
    if continues and (config.grammar is not None or config.tool_choice not in ("auto", "none")):
        raise UsageError(
            "An answer that continues a message can have no other form.",
            "Leave out the form and tool_choice, or the assistant's message at the end.",
        )
    if fields.echo and fields.suffix:
        raise UsageError("A prompt with a suffix cannot be echoed.", "Leave out 'echo' or 'suffix'.")
    return CompletionRequest(
        chat=chat,
        prompts=prompts,
        config=config,
        answers=fields.n,
        stream=fields.stream,
        with_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        with_speculation=fields.speculation,
        model=named,
        warnings=warnings.sentences,
        custom_tools=custom,
        calls_function=fields.calls_function,
        continues=continues,
        suffix=fields.suffix,
        echo=fields.echo,
    )


def names_model(asked: str, names: Collection[str]) -> bool:
    """Tell whether a request names the model by one of its names, which may be patterns."""
    known = {asked, asked.removesuffix(_TAG)} & set(names)
    return bool(known) or any(fnmatchcase(asked, name) for name in names)


def is_pattern(name: str) -> bool:
    """Tell whether a name of the model stands for many, so that it cannot be listed."""
    return "*" in name or "?" in name


def with_system(request: CompletionRequest, system: str | None) -> CompletionRequest:
    """A request for a chat with a system prompt, unless it has its own."""
    messages: Any = request.prompt
    if not system or any(message["role"] == "system" for message in messages):
        return request
    return replace(request, prompts=([{"role": "system", "content": system}, *messages],))


def check_size(prompt: Prompt, *, context: int, n_vocab: int, limits: Limits) -> None:
    """Refuse a prompt that cannot be answered, before it is tokenized.

    Args:
        context: most tokens of prompt and answer together.
        n_vocab: the model's tokens are 0 .. n_vocab - 1.
    """
    texts = texts_of(prompt)
    if not texts:
        if len(prompt) >= context:
            raise too_long(f"{len(prompt)} tokens", context)
        check_tokens(prompt, n_vocab)
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if size > max(limits.small_text, limits.text_per_token * context):
        raise too_long(f"{size:,} bytes", context)


def check_tokens(prompt: Prompt, n_vocab: int) -> None:
    """Refuse a prompt with tokens that the model does not have: others than 0 .. n_vocab - 1."""
    for token in prompt:
        if isinstance(token, int) and not 0 <= token < n_vocab:
            raise UsageError(f"There is no token {shown(token)}.", f"Tokens are 0 to {n_vocab - 1}.")


def too_long(size: str, context: int) -> ContextLengthError:
    """The error for a prompt of this size."""
    return ContextLengthError(
        f"The prompt has {size}, but the context holds {context} tokens, prompt plus answer.",
        "Shorten it, or start the server with a larger --context.",
    )


def nth_config(config: GenerationConfig, index: int) -> GenerationConfig:
    """The settings of answer number `index`: the seed counts up."""
    return config if config.seed is None else config.with_(seed=(config.seed + index) % (MAX_SEED + 1))


def model_name(asked: str | None, names: Collection[str], warnings: Warnings) -> str:
    """The name of the model in the answer, as it was asked for; empty for the served model's own."""
    if not asked:
        return ""
    if names_model(asked, names):
        return asked
    warnings.add(f"The model {shown(asked)} is not served here; {next(iter(names))!r} answers.")
    return ""


def inputs_of(name: str, given: Texts) -> list[str | list[int]]:
    """The texts in a field, or lists of tokens."""
    several = isinstance(given, list) and not all(isinstance(item, int) for item in given)
    inputs: Any = given if several else [given]
    if not all(item and isinstance(item, str | list) for item in inputs):
        raise UsageError(f"{name} must be a non-empty string or list of tokens, or a list of these.")
    return list(inputs)


def _text_prompts(fields: TextBody) -> tuple[str | list[int], ...]:
    """The texts to continue, or their tokens."""
    prompts = inputs_of("prompt", fields.prompt)
    if len(prompts) * fields.n > _MAX_ANSWERS:
        text = f"The request asks for {len(prompts) * fields.n:,} answers."
        raise UsageError(text, f"At most {_MAX_ANSWERS} are allowed.")
    return tuple(prompts)


def _continues(fields: CompletionFields, messages: Sequence[Message]) -> bool:
    """True if the last message is an assistant's, and not said to be complete."""
    last, wanted = messages[-1], fields.continue_final_message
    can = len(messages) > 1 and last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    if wanted is None:
        return bool(can) and not fields.add_generation_prompt
    if wanted and not can:
        raise UsageError(
            "There is no answer to continue.",
            "The last of several messages must be an assistant's, with text.",
        )
    return wanted
