"""Requests of the OpenAI API: untrusted JSON to what the engine takes, or the reason for refusing it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgespec.errors import ContextLengthError, UsageError
from edgespec.generation.config import MAX_SEED, GenerationConfig, Grammar
from edgespec.serving.limits import LARGEST_COUNT, Limits
from edgespec.serving.refusals import Refusal

if TYPE_CHECKING:
    from edgespec.models.text.encoding import Prompt

_MOST_ANSWERS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
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
# Unknown fields are ignored, because clients send many that change nothing. These would change the answer.
_UNSUPPORTED = {
    "tools": "Tools are",
    "functions": "Functions are",
    "logprobs": "Log-probabilities are",
    "top_logprobs": "Log-probabilities are",
    "logit_bias": "A logit bias is",
    "suffix": "A suffix is",
    "audio": "Audio is",
    "echo": "Echoing the prompt is",
}


@dataclass(frozen=True)
class Request:
    """A request for completions.

    Attributes:
        chat: the prompt is messages to answer; otherwise a text to continue.
        answers: how many.
        with_usage: the last piece of a stream reports the usage.
        with_speculation: the pieces of a stream report what was drafted and accepted.
    """

    chat: bool
    prompt: Prompt
    config: GenerationConfig
    answers: int
    stream: bool
    with_usage: bool
    with_speculation: bool = False


def read_request(
    body: object, defaults: GenerationConfig, *, chat: bool, model: str, limits: Limits | None = None
) -> Request:
    """The request in a body.

    Raises:
        UsageError: a field is missing, of the wrong kind, out of its range, or not supported here.
        Refusal: another model is requested.
    """
    limits = limits or Limits()
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    asked = body.get("model")
    if asked not in (None, "", model):
        text = f"The model {_shown(asked)} does not exist here. This server runs {model!r}."
        raise Refusal(404, text, "model_not_found")
    for name, what in _UNSUPPORTED.items():
        if body.get(name) not in (None, False, 0, "", [], {}):
            raise UsageError(f"{what} not supported.", f"Leave out {name!r}.")
    answers = _integer(body, "n", 1, _MOST_ANSWERS) or 1
    if body.get("best_of") not in (None, answers):
        raise UsageError("Choosing the best of several answers is not supported.", "Leave out 'best_of'.")
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise _wrong("stream_options", options, "an object")
    prompt: Prompt = _messages(body.get("messages"), limits) if chat else _text_prompt(body.get("prompt"))
    return Request(
        chat=chat,
        prompt=prompt,
        config=_config(body, defaults, limits),
        answers=answers,
        stream=_boolean(body, "stream"),
        with_usage=_boolean(options or {}, "include_usage"),
        with_speculation=_boolean(body, "speculation"),
    )


def check_size(prompt: Prompt, *, context: int, n_vocab: int, limits: Limits) -> None:
    """Refuse a prompt that cannot be answered, before it is tokenized.

    Args:
        context: most tokens of prompt and answer together.
        n_vocab: the model's tokens are 0 .. n_vocab - 1.

    Raises:
        UsageError: it names tokens that the model does not have.
        ContextLengthError: it is too long to fit, however it is tokenized.
    """
    texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m, Mapping)]
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
            raise UsageError(f"There is no token {_shown(token)}.", f"Tokens are 0 to {n_vocab - 1}.")


def too_long(size: str, context: int) -> ContextLengthError:
    """The error for a prompt of this size."""
    return ContextLengthError(
        f"The prompt has {size}, and the context holds {context} tokens of prompt and answer together.",
        "Shorten it, or start the server with a larger --context.",
    )


def nth_config(config: GenerationConfig, index: int) -> GenerationConfig:
    """The settings of answer number `index`: the seed counts up."""
    return config if config.seed is None else config.with_(seed=(config.seed + index) % (MAX_SEED + 1))


def _config(body: Mapping[str, Any], defaults: GenerationConfig, limits: Limits) -> GenerationConfig:
    changes: dict[str, Any] = {}
    for name, field in _INTEGERS.items():
        value = _integer(body, name, 0, LARGEST_COUNT)
        if value is not None:
            changes[field] = value
    for name in _NUMBERS:
        number = body.get(name)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _wrong(name, number, "a number")
        if isinstance(number, int) and abs(number) > LARGEST_COUNT:  # it may be too large for any float
            raise _wrong(name, number, "a smaller number")
        changes[name] = number
    seed = _integer(body, "seed", -MAX_SEED - 1, MAX_SEED)
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
        raise _wrong("stop", value, "a text or a list of texts")
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
            raise _wrong("grammar", grammar, "a text")
        forms.append(Grammar("grammar", grammar))
    if schema is not None:
        forms.append(_schema("json_schema", schema))
    if form is not None:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_object":
            forms.append(Grammar("json_schema", '{"type": "object"}'))
        elif kind == "json_schema" and isinstance(form.get("json_schema"), dict):
            forms.append(_schema("response_format", form["json_schema"].get("schema", {})))
        elif kind != "text":
            raise UsageError(
                "response_format is of the wrong kind.", "It must be text, json_object or json_schema."
            )
    if len(forms) > 1:
        raise UsageError("Several formats were requested for the answer.", "Ask for one of them.")
    return forms[0] if forms else None


def _schema(name: str, value: object) -> Grammar:
    if not isinstance(value, dict | bool):
        raise _wrong(name, value, "a JSON schema")
    return Grammar.of_schema(value)


def _text_prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise UsageError("The prompt is not one text or list of tokens, or empty.")


def _messages(value: object, limits: Limits) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise UsageError("The messages are not a list, or empty.")
    if len(value) > limits.messages:
        raise UsageError(f"There are {len(value):,} messages.", f"At most {limits.messages:,} are allowed.")
    return [_message(message) for message in value]


def _message(message: object) -> dict[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str) or role not in _ROLES:
        raise UsageError("A message is wrong.", f"It must have a role: {', '.join(_ROLES)}.")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    if not isinstance(content, str):
        raise UsageError("A message has no text as its content.")
    return {"role": _ROLES[role], "content": content}


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise UsageError("A part of a message is not text.", "Only text is supported.")
    return text


def _integer(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise _wrong(name, value, f"a whole number from {least} to {most}")
    return value


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _wrong(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{name} is {_shown(value)}.", f"It must be {wanted}.")


def _shown(value: object) -> str:
    """A value for a message, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**40:
        return "a number of very many digits"
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
        return "a list" if isinstance(value, Sequence) else "an object"
    return reprlib.repr(value)
