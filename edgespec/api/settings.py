"""The settings in a request: sampling, limits, log-probabilities and thinking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.api.limits import LARGEST_COUNT, Limits
from edgespec.api.values import boolean, integer, shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.generation.config import MAX_LOGPROBS, MAX_SEED, GenerationConfig
from edgespec.generation.thinking import EFFORTS, MAX_BUDGET, think_text

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
SETTINGS = (
    *_INTEGERS,
    *_NUMBERS,
    *("seed", "stop", "logprobs", "top_logprobs", "logit_bias"),
    *("think", "reasoning_effort", "chat_template_kwargs"),
)
"""The fields that are settings."""

_RANDOM_SEED = -1
_MAX_BIAS = 100


def read_settings(
    body: Mapping[str, Any], defaults: GenerationConfig, limits: Limits, warnings: Warnings, *, chat: bool
) -> GenerationConfig:
    """The settings in a body.

    Args:
        defaults: settings for what it leaves open.

    Raises:
        UsageError: a value has another type, or is out of its range.
    """
    changes: dict[str, Any] = {"logprobs": _logprobs(body, chat=chat)}
    think = read_think(body, warnings)
    if think is not None:
        changes["think"] = think
    for name, field in _INTEGERS.items():
        value = integer(body, name, -LARGEST_COUNT, LARGEST_COUNT)
        if value is not None:
            # As in llama.cpp's server, a negative number sets no limit.
            changes[field] = value if value >= 0 else None if field == "max_tokens" else 0
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
    bias = _logit_bias(body.get("logit_bias"))
    if bias:
        changes["logit_bias"] = bias
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


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """The bias of each token, by its number: an object, or llama.cpp's list of pairs."""
    if value in (None, {}, []):
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list):
        raise wrong("logit_bias", value, "an object")
    found: dict[int, float] = {}
    for pair in pairs:
        token, bias = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        bias = -_MAX_BIAS if bias is False else bias  # llama.cpp's way to forbid a token
        if isinstance(token, str) and token.strip().isdecimal() and len(token) < 12:
            token = int(token)
        if (
            type(token) is not int
            or not isinstance(bias, int | float)
            or isinstance(bias, bool)
            or not -_MAX_BIAS <= bias <= _MAX_BIAS
        ):
            given = shown(pair) if token is None else f"{shown(token)}: {shown(bias)}"
            raise UsageError(
                f"logit_bias must map token ids to numbers from -{_MAX_BIAS} to {_MAX_BIAS}, not {given}."
            )
        found[token] = float(bias)
    return tuple(sorted(found.items()))


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Read the number of log-probabilities beside each token's own; None for none at all."""
    if not chat:
        given = body.get("logprobs")
        if given is None or given is False:
            return None
        return 0 if given is True else integer(body, "logprobs", 0, MAX_LOGPROBS)
    top = integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if isinstance(body.get("logprobs"), int | float) and not isinstance(body["logprobs"], bool):
        return max(top or 0, integer(body, "logprobs", 0, MAX_LOGPROBS) or 0)  # as for completions
    return (top or 0) if boolean(body, "logprobs") or top else None


_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget")


def read_think(body: Mapping[str, Any], warnings: Warnings) -> str | None:
    """Read the request for thinking: `think`, the API's `reasoning_effort`, or variables of the template.

    Returns:
        The value for GenerationConfig; None if the request leaves it open.

    Raises:
        UsageError: a field has another form.
    """
    kwargs = body.get("chat_template_kwargs")
    if not isinstance(kwargs, dict | None):
        raise wrong("chat_template_kwargs", kwargs, "an object")
    for name in kwargs or {}:
        if name not in _KWARGS:
            warnings.ignored(f"chat_template_kwargs.{name}", f"It may have {', '.join(_KWARGS)} here.")
    own, effort = body.get("think"), body.get("reasoning_effort")
    if own is not None:
        return think_text(own)
    given = kwargs or {}
    budget = integer(given, "thinking_budget", 0, MAX_BUDGET)
    if budget is not None:
        return str(budget)
    switches = [given[name] for name in ("enable_thinking", "thinking") if given.get(name) is not None]
    if switches and not isinstance(switches[0], bool):
        raise wrong("enable_thinking", switches[0], "true or false")
    if switches and not switches[0]:
        return "off"
    effort = effort if effort is not None else given.get("reasoning_effort")
    if effort is None:
        return "on" if switches else None
    named = {
        "none": "off",
        "minimal": "low",
        "xhigh": "high",
        "max": "high",
        **{word: word for word in EFFORTS},
    }
    if not isinstance(effort, str) or effort not in named:
        raise wrong("reasoning_effort", effort, f"one of {', '.join(named)}")
    return named[effort]
