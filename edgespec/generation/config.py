"""Generation settings: sampling, limits, verification rule, and the form an answer must have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

from edgespec.errors import GrammarError, InvalidValueError, UsageError
from edgespec.generation.rules import Rule, parse_rule
from edgespec.generation.thinking import ThinkingRequest, parse_think, think_text
from edgespec.generation.tools import Tool, check_choice, tools_of
from edgespec.printable import shown


def short_repr(self: Any) -> str:
    """Format as GenerationConfig(max_tokens=32, temperature=0.8); to be assigned to `__repr__`."""
    shown = []
    for field in fields(self):
        value = getattr(self, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value != default:
            shown.append(
                f"{field.name}={value:.4g}" if isinstance(value, float) else f"{field.name}={value!r}"
            )
    return f"{type(self).__name__}({', '.join(shown)})"


MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
NOT_SETTINGS = (
    *("grammar", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "logit_bias", "min_tokens"),
    "stop_tokens",
)
"""Fields of GenerationConfig that say what is asked for, rather than how it is generated."""

_LISTS = ("stop", "dry_sequence_breakers", "banned_strings")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "min_p": (0, 1),
    "top_n_sigma": (-1, 100),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "repeat_penalty": (0.01, 100),
    "frequency_penalty": (-100, 100),
    "presence_penalty": (-100, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
}


@dataclass(frozen=True)
class Grammar:
    """A form that answers must have.

    Attributes:
        kind: what `text` is: "json_schema", "grammar" (llama.cpp's GBNF, or Lark) or "regex".
    """

    kind: Literal["json_schema", "grammar", "regex"]
    text: str

    @classmethod
    def of_schema(cls, schema: object) -> Grammar:
        """The form of a JSON schema that is already parsed.

        Raises:
            GrammarError: it is nested too deeply to be written as JSON, or is not JSON.
        """
        try:
            return cls("json_schema", json.dumps(schema))
        except RecursionError:
            raise GrammarError(
                "The JSON schema is nested too deeply.", 'Flatten it with "$defs" and "$ref".'
            ) from None
        except (TypeError, ValueError) as error:
            raise GrammarError(f"The JSON schema is not JSON: {error}.", "Correct it.") from error


@dataclass(frozen=True)
class GenerationConfig:
    """Settings for generating one answer.

    Samplers apply in llama.cpp's default order: bias, penalties, DRY, top-n-sigma, top-k, top-p, min-p, XTC,
    temperature.

    Attributes:
        max_tokens: maximum tokens to generate; None sets no limit but the context.
        temperature: 0 takes the most likely token (greedy decoding); above 0 samples.
        top_k: sample among the k most likely tokens; 0 means all.
        top_p: sample from the smallest set of tokens whose probability reaches top_p; 1 means all.
        min_p: drop tokens less likely than min_p x the most likely one; 0 means none.
        top_n_sigma: drop tokens whose logits are more than this many standard deviations below the best (Tang
            et al. 2024); 0 or less is off.
        xtc_probability: how likely XTC ("exclude top choices") applies at a position; 0 is off.
        xtc_threshold: where XTC applies, only the least likely of the tokens that are at least this likely is
            kept, with those below.
        repeat_penalty: divides the positive logits of tokens already in the text, and multiplies the negative
            ones (Keskar et al. 2019); 1 is off.
        frequency_penalty: subtracted from a token's logit for each of its occurrences; 0 is off.
        presence_penalty: subtracted once from the logit of every token already in the text; 0 is off.
        penalty_window: how many of the last tokens the penalties consider; 0 means all.
        dry_multiplier: penalty of DRY ("don't repeat yourself") for a token that would continue a repetition
            of `dry_allowed_length` tokens; 0 is off.
        dry_base: the penalty grows by this factor with every further token of the repetition.
        dry_allowed_length: repetitions of fewer tokens may be continued.
        dry_penalty_last_n: how many of the last tokens DRY considers; -1 means all, and 0 turns it off.
        dry_sequence_breakers: strings across which nothing counts as repeated.
        banned_strings: strings that the answer must not contain, regardless of the case of ASCII letters; a
            token that would complete one is refused, and the next best is chosen.
        seed: fixes the sampled text, whatever the drafter or the tree; None picks one and reports it.
        stop: the answer ends before the first occurrence of one of these strings.
        grammar: the form that the answer must have, unless it calls tools.
        verify: the rule by which drafted tokens are accepted, NAME or NAME:PARAMETER=VALUE,...; "auto" is
            greedy at temperature 0 and shared noise above.
        think: how a model that can think does it: "auto" as its chat template has it, "on", "off", an effort
            ("low", "medium", "high"), or the most tokens of a thought ("500", "budget 500"). True, False and
            a number will do, too.
        tools: functions that the model may call, each a `Tool` or its definition in the OpenAI API's form.
        tool_choice: "auto", "none", "required", or the name of the tool that must be called.
        parallel_tool_calls: whether an answer may call more than one.
        logprobs: how many of the likeliest tokens are recorded for each token of the answer, with their
            log-probabilities, besides its own; None records nothing.
        logit_bias: tokens, and what is added to the logit of each before anything else; tokens that the model
            does not have are left out.
        min_tokens: tokens that the answer has before it may end by an end token or one of `stop_tokens`.
        stop_tokens: tokens that end the answer, besides the model's own; they are not part of it.

    Raises:
        UsageError: a value is out of its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    banned_strings: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    verify: str = "auto"
    think: str = "auto"
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "think", think_text(self.think))
        listed = isinstance(self.tools, Sequence) and not isinstance(self.tools, str | bytes)
        _check(listed, "tools", self.tools, "a list of tools")
        object.__setattr__(self, "tools", tools_of(self.tools))
        for field in fields(self):
            _check_kind(field.name, str(field.type), getattr(self, field.name))
        for name in _LISTS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
            _check(all(getattr(self, name)), name, "", "a non-empty string")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            _check(low <= value <= high, name, value, f"from {low:g} to {high:g}")  # not so for NaN
        _check(
            self.max_tokens is None or self.max_tokens >= 0,
            "max_tokens",
            self.max_tokens,
            "0 or more",
        )
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _check(
            0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "above 0 and at most 1",
        )
        _check(
            self.penalty_window >= 0,
            "penalty_window",
            self.penalty_window,
            "0 (everything) or more",
        )
        _check(self.dry_allowed_length >= 1, "dry_allowed_length", self.dry_allowed_length, "1 or more")
        _check(
            self.dry_penalty_last_n >= -1,
            "dry_penalty_last_n",
            self.dry_penalty_last_n,
            "-1 (everything) or more",
        )
        _check(
            self.seed is None or 0 <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            f"from 0 to {MAX_SEED}",
        )
        if parse_rule(self.verify).name == "greedy" and not self.greedy:
            raise UsageError(
                f"The rule 'greedy' takes the likeliest token, and temperature is {self.temperature}.",
                "Leave out one of them.",
            )
        parse_think(self.think)
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.min_tokens and (self.grammar is not None or self.offers_tools):
            raise UsageError(
                "An answer whose form is given ends where the form does.",
                "Leave out min_tokens and ignore_eos, or the grammar, schema or tools.",
            )
        check_choice(self.tool_choice, self.tools)
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"an integer from 0 to {MAX_LOGPROBS}",
        )

    @property
    def thinking(self) -> ThinkingRequest:
        """The thinking of a model that can think."""
        return parse_think(self.think)

    @property
    def offers_tools(self) -> bool:
        """True if the model may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def rule(self) -> Rule:
        """The rule in force at this temperature."""
        return parse_rule(self.verify).in_force(greedy=self.greedy)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken (of those that XTC leaves)."""
        return self.temperature == 0

    @property
    def draws(self) -> bool:
        """True if the answer depends on the seed."""
        return not self.greedy or self.xtc_probability > 0

    @property
    def penalizes(self) -> bool:
        """True if tokens are less likely because of others before them."""
        return self.penalizes_tokens or self.penalizes_repetitions

    @property
    def penalizes_tokens(self) -> bool:
        """True if tokens are penalized because they occurred before."""
        return (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def penalizes_repetitions(self) -> bool:
        """True if tokens are penalized because they would continue a repetition (DRY)."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    def with_(self, **changes: Any) -> GenerationConfig:
        """A copy with some values changed.

        Raises:
            UsageError: a name is unknown, or a value is of the wrong kind or out of its range.
        """
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise UsageError(
                    f"There is no setting '{name}'.",
                    f"The settings are {', '.join(sorted(known))}.",
                )
        return replace(self, **changes)


def shortened(text: str, most: int = 80) -> str:
    """The text, or the beginning of a long one, because a value in a message may have thousands of digits."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", lambda value: _is_number(value, Integral)),
    "float": ("a number", lambda value: _is_number(value, Real)),
    "str": ("a string", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": (
        "a list of strings",
        lambda value: isinstance(value, list | tuple) and all(isinstance(item, str) for item in value),
    ),
}


def _check_kind(name: str, declared: str, value: object) -> None:
    """Refuse a value of another type than its field declares: it may come from JSON or TOML."""
    kind, _, nothing = declared.partition(" | ")
    if kind in _KINDS and not (nothing and value is None):
        wanted, holds = _KINDS[kind]
        if not holds(value):
            raise InvalidValueError(name, f"must be {wanted}, not {shown(value)}.")


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)  # as it was typed
        raise InvalidValueError(name, f"must be {wanted}, not {shown(value)}.")
