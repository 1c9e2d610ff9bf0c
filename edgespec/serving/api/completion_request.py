"""Requests of the OpenAI API: untrusted JSON to what the engine takes, or the reason for refusing it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from edgespec.errors import ContextLengthError, UsageError
from edgespec.generation.config import MAX_SEED, MOST_LOGPROBS, GenerationConfig, Grammar
from edgespec.serving.api.limits import LARGEST_COUNT, Limits
from edgespec.serving.api.messages import read_messages, read_tools, texts_of
from edgespec.serving.api.reasoning import read_think
from edgespec.serving.api.refusals import Refusal
from edgespec.serving.api.values import boolean, integer, shown, wrong

if TYPE_CHECKING:
    from edgespec.models.text.encoding import Prompt

_MOST_ANSWERS = 128
# The API's names (ours where it has none) for fields of GenerationConfig.
_INTEGERS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "top_k": "top_k",
    "penalty_window": "penalty_window",
}
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_RANDOM_SEED = -1
# These would change the answer.
_UNSUPPORTED = {
    "functions": "Functions are",
    "function_call": "Functions are",
    "logit_bias": "A logit bias is",
    "suffix": "A suffix is",
    "audio": "Audio is",
    "echo": "Echoing the prompt is",
}
_OTHERS = (
    *("model", "messages", "prompt", "n", "best_of", "stream", "stream_options", "stop", "seed"),
    *("response_format", "grammar", "json_schema", "tools", "tool_choice", "parallel_tool_calls"),
    *("logprobs", "top_logprobs", "think", "reasoning_effort", "chat_template_kwargs"),
    *("speculation", "continue_final_message"),
)
CHAT_FIELDS = (*_INTEGERS, *_NUMBERS, *_UNSUPPORTED, *_OTHERS)
"""Fields that mean something in a request for a chat or a completion, if only that they are refused."""

# Clients send these, and they change nothing about an answer here.
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "modalities", "prediction", "verbosity", "cache_prompt", "id_slot"),
    *("timings_per_token", "return_progress"),
)
_CLOSE = 0.85
_MOST_NAMED = 8


@dataclass(frozen=True)
class CompletionRequest:
    """A request for completions.

    Attributes:
        chat: the prompt is messages to answer; otherwise a text to continue.
        answers: how many.
        with_usage: the last piece of a stream reports the usage.
        with_speculation: the pieces of a stream report what was drafted and accepted.
        model: the name by which the model was asked for; empty if it was not named.
        warnings: what of the request has no effect, in sentences.
        continues: the last message is the beginning of the answer.
    """

    chat: bool
    prompt: Prompt
    config: GenerationConfig
    answers: int
    stream: bool
    with_usage: bool
    with_speculation: bool = False
    model: str = ""
    warnings: tuple[str, ...] = ()
    continues: bool = False


def read_request(
    body: object,
    defaults: GenerationConfig,
    *,
    chat: bool,
    model: str,
    aliases: Collection[str] = (),
    limits: Limits | None = None,
) -> CompletionRequest:
    """The request in a body.

    Args:
        defaults: settings for what it leaves open.
        model: the model's name.
        aliases: its other names, which may be patterns such as "claude-*".

    Raises:
        UsageError: a field is missing, of the wrong kind, out of its range, or not supported here.
        Refusal: another model is requested.
    """
    limits = limits or Limits()
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    asked = body.get("model")
    if asked not in (None, "") and not names_model(asked, (model, *aliases)):
        text = f"The model {shown(asked)} does not exist here. This server runs {model!r}."
        raise Refusal(404, text, "model_not_found")
    for name, what in _UNSUPPORTED.items():
        if body.get(name) not in (None, False, 0, "", [], {}):
            raise UsageError(f"{what} not supported.", f"Leave out {name!r}.")
    warnings = _warnings(body)
    answers = integer(body, "n", 1, _MOST_ANSWERS) or 1
    if body.get("best_of") not in (None, answers):
        raise UsageError("Choosing the best of several answers is not supported.", "Leave out 'best_of'.")
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise wrong("stream_options", options, "an object")
    prompt: Prompt = read_messages(body.get("messages"), limits) if chat else _text_prompt(body.get("prompt"))
    config = _config(body, defaults, limits, chat=chat)
    continues = boolean(body, "continue_final_message")
    if continues:
        _check_continuation(prompt, config, chat=chat)
    return CompletionRequest(
        chat=chat,
        prompt=prompt,
        config=config,
        answers=answers,
        stream=boolean(body, "stream"),
        with_usage=boolean(options or {}, "include_usage"),
        with_speculation=boolean(body, "speculation"),
        model=asked if isinstance(asked, str) else "",
        warnings=warnings,
        continues=continues,
    )


def _check_continuation(prompt: Any, config: GenerationConfig, *, chat: bool) -> None:
    """Refuse to continue what is no text of an assistant behind another message."""
    if not chat or len(prompt) < 2 or prompt[-1]["role"] != "assistant" or not prompt[-1]["content"]:
        raise UsageError(
            "There is no answer to continue.",
            "The last of several messages must be an assistant's, with text.",
        )
    if config.tools or config.grammar is not None or prompt[-1].get("tool_calls"):
        raise UsageError("Only a plain text can be continued.", "Leave out the tools and the format.")


def names_model(asked: object, names: Collection[str]) -> bool:
    """Tell whether a request names the model by one of its names, which may be patterns."""
    return isinstance(asked, str) and (asked in names or any(fnmatchcase(asked, name) for name in names))


def is_pattern(name: str) -> bool:
    """Tell whether a name of the model stands for many, so that it cannot be listed."""
    return "*" in name or "?" in name


def with_system(request: CompletionRequest, system: str | None) -> CompletionRequest:
    """A request for a chat with a system prompt, unless it has its own."""
    messages: Any = request.prompt
    if not system or any(message["role"] == "system" for message in messages):
        return request
    return replace(request, prompt=[{"role": "system", "content": system}, *messages])


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


def _warnings(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Warn of fields without effect; raises UsageError for a name that is one of ours, but for a slip."""
    unknown = [name for name in body if name not in CHAT_FIELDS and name not in _WITHOUT_EFFECT]
    for name in unknown:
        close = difflib.get_close_matches(name[:64], CHAT_FIELDS, n=1, cutoff=_CLOSE)
        if close:
            raise UsageError(f"There is no field {shown(name)}.", f"Did you mean {close[0]!r}?")
    return tuple(f"Ignored unknown field {shown(name)}." for name in unknown[:_MOST_NAMED])


def _config(
    body: Mapping[str, Any], defaults: GenerationConfig, limits: Limits, *, chat: bool
) -> GenerationConfig:
    changes: dict[str, Any] = read_tools(body, chat=chat)
    size = sum(len(tool.parameters) + len(tool.description) for tool in changes.get("tools", ()))
    if size > limits.grammar:
        raise UsageError(f"The tools have {size:,} characters.", f"At most {limits.grammar:,} are allowed.")
    changes["logprobs"] = _logprobs(body, chat=chat)
    think = read_think(body)
    if think is not None:
        changes["think"] = think
    for name, field in _INTEGERS.items():
        value = integer(body, name, 0, LARGEST_COUNT)
        if value is not None:
            changes[field] = value
    for name in _NUMBERS:
        number = body.get(name)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise wrong(name, number, "a number")
        if isinstance(number, int) and abs(number) > LARGEST_COUNT:  # it may be too large for any float
            raise wrong(name, number, "a smaller number")
        changes[name] = number
    seed = integer(body, "seed", -MAX_SEED - 1, MAX_SEED)
    if seed is not None:
        # The API allows negative seeds, and -1 is how clients of llama.cpp ask for a random one.
        changes["seed"] = None if seed == _RANDOM_SEED else seed % (MAX_SEED + 1)
    if body.get("stop") is not None:
        changes["stop"] = _stops(body["stop"], limits)
    grammar = _grammar(body)
    if grammar is not None:
        if len(grammar.text) > limits.grammar:
            raise UsageError(
                f"The {grammar.kind.replace('_', ' ')} has {len(grammar.text):,} characters.",
                f"At most {limits.grammar:,} are allowed.",
            )
        changes["grammar"] = grammar
    return defaults.with_(**changes)


def _stops(value: object, limits: Limits) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong("stop", value, "a string or a list of strings")
    if len(texts) > limits.stops or any(len(text) > limits.stop_length for text in texts):
        raise UsageError(
            "There are too many stop strings, or one is too long.",
            f"At most {limits.stops} of {limits.stop_length} characters each are allowed.",
        )
    return tuple(text for text in texts if text)


def _grammar(body: Mapping[str, Any]) -> Grammar | None:
    """The grammar that is requested: by `response_format`, or in the way of llama.cpp's server."""
    forms = []
    grammar, schema, form = (body.get(name) for name in ("grammar", "json_schema", "response_format"))
    if grammar not in (None, ""):
        if not isinstance(grammar, str):
            raise wrong("grammar", grammar, "a string")
        forms.append(Grammar("grammar", grammar))
    if schema is not None:
        forms.append(_schema("json_schema", schema))
    if form is not None:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_object":
            forms.append(Grammar("json_schema", '{"type": "object"}'))
        elif kind == "json_schema" and isinstance(form.get("json_schema"), dict):
            wanted = form["json_schema"]
            forms.append(
                _schema("response_format", wanted.get("schema", {}), closed=wanted.get("strict") is True)
            )
        elif kind != "text":
            raise UsageError("response_format must be text, json_object or json_schema.")
    if len(forms) > 1:
        raise UsageError("Several answer formats were requested.", "Request one of them.")
    return forms[0] if forms else None


def _schema(name: str, value: object, *, closed: bool = False) -> Grammar:
    """The grammar of a JSON schema.

    Args:
        closed: its objects have no properties but those that are listed, unless it says otherwise.
    """
    if not isinstance(value, dict | bool):
        raise wrong(name, value, "a JSON schema")
    if closed and isinstance(value, dict):
        from edgespec.models.text.calls.closed_arguments import closed_schema

        value = closed_schema(value)
    return Grammar.of_schema(value)


def _text_prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise UsageError("prompt must be a non-empty string or list of tokens.")


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Read the number of log-probabilities beside each token's own; None for none at all."""
    if not chat:
        if body.get("logprobs") in (None, False):
            return None
        return integer(body, "logprobs", 0, MOST_LOGPROBS)
    top = integer(body, "top_logprobs", 0, MOST_LOGPROBS)
    if boolean(body, "logprobs"):
        return top or 0
    if top:
        raise UsageError(f"top_logprobs is {top}, but logprobs is not true.", 'Add "logprobs": true.')
    return None
