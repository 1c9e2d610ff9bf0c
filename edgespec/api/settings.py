"""The settings in a request: sampling, limits, log-probabilities and thinking."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from edgespec.api.fields import Fields, read_fields
from edgespec.api.limits import LARGEST_COUNT, Limits
from edgespec.api.warnings import Warnings, wrong
from edgespec.errors import UsageError
from edgespec.generation.config import MAX_LOGPROBS, MAX_SEED, GenerationConfig
from edgespec.generation.thinking import MAX_BUDGET, think_text

Count = Annotated[int, Meta(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Budget = Annotated[int, Meta(ge=0, le=MAX_BUDGET)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Bias = Annotated[float, Meta(ge=-100, le=100)] | bool
Schema = dict[str, Any] | bool

_EFFORTS = {"none": "off", "minimal": "low", "xhigh": "high", "max": "high"}
_RANDOM_SEED = -1
# Names of the OpenAI API, Ollama, llama.cpp, vLLM and KoboldCpp.
_ALIASES = {
    "max_completion_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_last_n": "penalty_window",
    "nsigma": "top_n_sigma",
    "banned_tokens": "banned_strings",
    "stop_token_ids": "stop_tokens",
}
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty", "penalty_window")
_NEVER = LARGEST_COUNT  # tokens after which an answer may end that ignores end tokens
_LEAST_TOP_P = 1e-9
_MAX_STOP_TOKENS = 64
_LEAST = {"top_k": 0, "penalty_window": 0, "dry_penalty_last_n": -1}
_STRINGS = ("stop", "dry_sequence_breakers", "banned_strings")

_SettingsT = TypeVar("_SettingsT", bound="Settings")


class Sampling(Fields):
    """Settings with the names that they have in GenerationConfig, and behind them those of other programs."""

    max_tokens: Count | None = None
    temperature: float | None = None
    top_k: Count | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_window: Count | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Count | None = None
    dry_sequence_breakers: str | list[str] | None = None
    banned_strings: str | list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_completion_tokens: Count | None = None
    num_predict: Count | None = None
    n_predict: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=LARGEST_COUNT)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=_MAX_STOP_TOKENS)] | None = None
    repeat_last_n: Count | None = None
    nsigma: float | None = None
    banned_tokens: str | list[str] | None = None

    def given(self) -> dict[str, Any]:
        """The settings that the request does not leave open, by their names in GenerationConfig."""
        values = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        found = {_ALIASES.get(name, name): value for name, value in values.items() if value is not None}
        if self.repeat_last_n == 0:  # which turns penalties off, where it is all tokens elsewhere
            return {name: value for name, value in found.items() if name not in _PENALTIES}
        return found


class StructuredOutputs(Struct):
    """The form of an answer as vLLM names it."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None


class Settings(Sampling):
    """The settings that requests of all APIs have, by the OpenAI API's names, and ours where it has none."""

    model: str | None = None
    stream: bool = False
    logit_bias: Annotated[
        dict[int, Bias] | list[tuple[int, Bias]] | None,
        Meta(description="an object of token ids and numbers from -100 to 100"),
    ] = None
    think: bool | int | str | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    ignore_eos: bool = False
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    # Forms as requests for vLLM and SGLang name them.
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def as_kind(self, kind: type[_SettingsT], **more: Any) -> _SettingsT:
        """These fields in a request of another kind, as far as it has them, and more."""
        same = {name for name in kind.__struct_fields__ if name in self.__struct_fields__}
        return kind(**{name: getattr(self, name) for name in same} | more)

    def config(self, defaults: GenerationConfig, limits: Limits, warnings: Warnings) -> GenerationConfig:
        """These settings, and others from `defaults`."""
        changes = self.given()
        if changes.get("max_tokens", 0) < 0:  # the server's own limit holds, as in llama.cpp's
            del changes["max_tokens"]
        changes |= {name: max(changes[name], least) for name, least in _LEAST.items() if name in changes}
        if changes.get("top_p") == 0:  # of the API: the likeliest token alone
            changes["top_p"] = _LEAST_TOP_P
        seed = changes.get("seed", 0)
        if -(MAX_SEED // 2) - 1 <= seed < 0:  # the API allows negative seeds
            changes["seed"] = None if seed == _RANDOM_SEED else seed % (MAX_SEED + 1)
        changes |= {name: _strings(name, changes[name], limits) for name in _STRINGS if name in changes}
        if "stop_tokens" in changes:
            changes["stop_tokens"] = tuple(changes["stop_tokens"])
        if self.ignore_eos:
            changes["min_tokens"] = _NEVER
        if self.logit_bias:
            biases = dict(self.logit_bias)
            if any(bias is True for bias in biases.values()):
                raise wrong("A value of logit_bias", True, "a number from -100 to 100")
            # False is llama.cpp's way to forbid a token.
            biases = {token: float(-100 if bias is False else bias) for token, bias in biases.items()}
            changes["logit_bias"] = tuple(sorted(biases.items()))
        think = self._think(warnings)
        if think is not None:
            changes["think"] = think
        return defaults.with_(**changes)

    def _think(self, warnings: Warnings) -> str | None:
        """The thinking that the request asks for, for GenerationConfig; None if it leaves that open."""
        at = "chat_template_kwargs"
        kwargs = read_fields(self.chat_template_kwargs or {}, TemplateVariables, warnings, at)
        if self.think is not None:
            return think_text(self.think)
        if kwargs.thinking_budget is not None:
            return str(kwargs.thinking_budget)
        switch = kwargs.thinking if kwargs.enable_thinking is None else kwargs.enable_thinking
        effort = self.reasoning_effort or kwargs.reasoning_effort
        if switch is False:
            return "off"
        if effort is not None:
            return _EFFORTS.get(effort, effort)
        return "on" if switch else None


class TemplateVariables(Fields):
    """The variables of chat templates that requests may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: Budget | None = None


def n_logprobs(given: bool | int | None, top: int | None = None) -> int | None:
    """The number of log-probabilities beside each token's own; None for none at all.

    Args:
        given: `logprobs` of the request: the number, or whether there are any.
        top: `top_logprobs` of a request for a chat.
    """
    if given is None or given is False:
        return top or None
    return max(top or 0, 0 if given is True else given)


def _strings(name: str, given: str | list[str], limits: Limits) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if name == "banned_strings":
        if len(texts) > limits.banned or sum(map(len, texts)) > limits.banned_length:
            raise UsageError(
                f"{name} has too many strings, or they are too long.",
                f"At most {limits.banned} with {limits.banned_length} characters in all are allowed.",
            )
    elif len(texts) > limits.stops or any(len(text) > limits.stop_length for text in texts):
        raise UsageError(
            f"{name} has too many strings, or one is too long.",
            f"At most {limits.stops} of {limits.stop_length} characters each are allowed.",
        )
    return tuple(text for text in texts if text)
