"""Requests of the OpenAI API: untrusted JSON to what the engine takes, or the reason for refusing it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from edgespec.api.fields import warn_of_fields
from edgespec.api.formats import read_format
from edgespec.api.images import RequestImages
from edgespec.api.limits import Limits
from edgespec.api.messages import read_messages, texts_of
from edgespec.api.settings import read_settings
from edgespec.api.text_logprobs import EchoedPrompt
from edgespec.api.tools import read_tools
from edgespec.api.values import boolean, integer, shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import ContextLengthError, UsageError
from edgespec.generation.config import MAX_SEED, GenerationConfig

if TYPE_CHECKING:
    from edgespec.text.encoding import Prompt

_MAX_ANSWERS = 128
_TAG = ":latest"  # of a model's name, which Ollama's clients add


@dataclass(frozen=True)
class CompletionRequest:
    """A request for completions.

    Attributes:
        chat: the prompts are messages to answer; otherwise texts to continue.
        prompts: what is to be answered; several texts, or one conversation.
        answers: how many to each.
        with_usage: the last piece of a stream reports the usage.
        with_speculation: the pieces of a stream report what was drafted and accepted.
        model: the name by which the model was asked for; empty if it was not named, or by an unknown name.
        warnings: what of the request has no effect, in sentences.
        custom_tools: names of tools that take a text.
        suffix: what stands behind the completion.
        continues: the last message is the beginning of the answer.
        echo: the prompt stands in front of the answer, with its log-probabilities if those are wanted.
        echoed: these prompts, once they are tokens.
    """

    chat: bool
    prompts: tuple[Prompt, ...]
    config: GenerationConfig
    answers: int
    stream: bool
    with_usage: bool
    with_speculation: bool = False
    model: str = ""
    warnings: Sequence[str] = ()
    custom_tools: frozenset[str] = frozenset()
    suffix: str = ""
    continues: bool = False
    echo: bool = False
    echoed: tuple[EchoedPrompt, ...] = ()

    @property
    def scores_prompts(self) -> bool:
        """True if the log-probabilities of the prompts' tokens are wanted."""
        return self.echo and self.config.logprobs is not None

    @property
    def prompt(self) -> Prompt:
        """The first of the prompts."""
        return self.prompts[0]


def read_request(
    body: object,
    defaults: GenerationConfig,
    *,
    chat: bool,
    model: str,
    aliases: Collection[str] = (),
    limits: Limits | None = None,
    warnings: Warnings | None = None,
    strict: bool = False,
    images: RequestImages | None = None,
) -> CompletionRequest:
    """The request in a body.

    Args:
        defaults: settings for what it leaves open.
        model: the model's name.
        aliases: its other names, which may be patterns such as "claude-*".
        warnings: those so far; more are added.
        strict: refuse a field whose name is nearly that of another one, instead of a warning.
        images: reads those of the request; without it, they become notes.

    Raises:
        UsageError: a field has no meaning: it is missing, has another type, or is out of its range.
    """
    limits = limits or Limits()
    warnings = warnings or Warnings()
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    named = model_name(body.get("model"), (model, *aliases), warnings)
    warn_of_fields(body, warnings, chat=chat, strict=strict)
    answers = integer(body, "n", 1, _MAX_ANSWERS) or 1
    if body.get("best_of") not in (None, answers):
        warnings.ignored("best_of", "Answers are not compared.")
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise wrong("stream_options", options, "an object")
    offered = read_tools(body, limits, warnings, chat=chat)
    config = read_settings(body, defaults, limits, warnings, chat=chat).with_(**offered.settings)
    grammar = read_format(body, limits, warnings)
    if grammar is not None:
        config = config.with_(grammar=grammar)
        if config.offers_tools and config.tool_choice != "auto":
            warnings.ignored("the format of the answer", "tool_choice requires a call.")
    prompts: tuple[Prompt, ...] = (
        (read_messages(body.get("messages"), limits, warnings, images),)
        if chat
        else _text_prompts(body.get("prompt"), answers)
    )
    continues = chat and _continues(body, prompts[0])
    if continues and (config.grammar is not None or config.tool_choice not in ("auto", "none")):
        warnings.ignored("the form of the answer", "The answer continues the assistant's message.")
        config = config.with_(grammar=None, tool_choice="auto")
    return CompletionRequest(
        chat=chat,
        prompts=prompts,
        config=config,
        answers=answers,
        stream=boolean(body, "stream"),
        with_usage=boolean(options or {}, "include_usage"),
        with_speculation=boolean(body, "speculation"),
        model=named,
        warnings=warnings.sentences,
        custom_tools=offered.custom,
        continues=continues,
        suffix=(suffix := _suffix(body.get("suffix"), warnings, chat=chat)),
        echo=_echo(body, suffix, warnings, chat=chat),
    )


def names_model(asked: object, names: Collection[str]) -> bool:
    """Tell whether a request names the model by one of its names, which may be patterns."""
    if not isinstance(asked, str):
        return False
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

    Raises:
        UsageError: it names tokens that the model does not have.
        ContextLengthError: it is too long to fit, however it is tokenized.
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
    """Refuse a prompt with tokens that the model does not have: others than 0 .. n_vocab - 1.

    Raises:
        UsageError: it has.
    """
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


def model_name(asked: object, names: Collection[str], warnings: Warnings) -> str:
    """The name of the model in the answer, as it was asked for; empty for the served model's own.

    Raises:
        UsageError: it is no name.
    """
    if asked in (None, ""):
        return ""
    if not isinstance(asked, str):
        raise wrong("model", asked, "a name")
    if names_model(asked, names):
        return asked
    warnings.add(f"The model {shown(asked)} is not served here; {next(iter(names))!r} answers.")
    return ""


def _text_prompts(value: object, answers: int) -> tuple[str | list[int], ...]:
    """The texts to continue: one, or a list; each may be a list of tokens."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    prompts: list[str | list[int]] = []
    for prompt in several:
        is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not isinstance(prompt, str | list) or not prompt or not (is_tokens or isinstance(prompt, str)):
            raise UsageError("prompt must be a non-empty string or list of tokens, or a list of these.")
        prompts.append(prompt)
    if len(prompts) * answers > _MAX_ANSWERS:
        text = f"The request asks for {len(prompts) * answers:,} answers."
        raise UsageError(text, f"At most {_MAX_ANSWERS} are allowed.")
    return tuple(prompts)


def _continues(body: Mapping[str, Any], messages: Any) -> bool:
    """True if the last message is an assistant's, and not said to be complete.

    Raises:
        UsageError: there is none to continue, although the request says so.
    """
    last = messages[-1]
    can = len(messages) > 1 and last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    wanted = body.get("continue_final_message")
    if wanted is None:
        return bool(can) and not boolean(body, "add_generation_prompt")
    if boolean(body, "continue_final_message") and not can:
        raise UsageError(
            "There is no answer to continue.",
            "The last of several messages must be an assistant's, with text.",
        )
    return bool(wanted)


def _echo(body: Mapping[str, Any], suffix: str, warnings: Warnings, *, chat: bool) -> bool:
    echo = boolean(body, "echo")
    if echo and suffix:
        raise UsageError("A prompt with a suffix cannot be echoed.", "Leave out 'echo' or 'suffix'.")
    if echo and chat:
        warnings.ignored("echo", "It is for completions.")
    return echo and not chat


def _suffix(value: object, warnings: Warnings, *, chat: bool) -> str:
    if value in (None, ""):
        return ""
    if not isinstance(value, str):
        raise wrong("suffix", value, "a string")
    if chat:
        warnings.ignored("suffix", "It is for completions.")
        return ""
    return value
