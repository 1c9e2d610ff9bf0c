"""The settings in a request: sampling, limits, log-probabilities and thinking."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from edgespec.api.fields import Fields, read_fields
from edgespec.api.limits import LARGEST_COUNT, Limits
from edgespec.api.warnings import Warnings
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

_SettingsT = TypeVar("_SettingsT", bound="Settings")


class Sampling(Fields):
    """Settings with the names that they have in GenerationConfig."""

    max_tokens: Count | None = None
    temperature: float | None = None
    top_k: Count | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_window: Count | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def given(self) -> dict[str, Any]:
        """The settings that the request does not leave open."""
        values = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}


class Settings(Sampling):
    """The settings that requests of all APIs have, by the OpenAI API's names, and ours where it has none."""

    model: str | None = None
    stream: bool = False
    max_completion_tokens: Count | None = None
    logit_bias: Annotated[
        dict[int, Bias] | list[tuple[int, Bias]] | None,
        Meta(description="an object of token ids and numbers from -100 to 100"),
    ] = None
    think: bool | int | str | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: Schema | None = None

    def as_kind(self, kind: type[_SettingsT], **more: Any) -> _SettingsT:
        """These fields in a request of another kind, as far as it has them, and more."""
        same = {name for name in kind.__struct_fields__ if name in self.__struct_fields__}
        return kind(**{name: getattr(self, name) for name in same} | more)

    def config(self, defaults: GenerationConfig, limits: Limits, warnings: Warnings) -> GenerationConfig:
        """These settings, and others from `defaults`.

        Raises:
            UsageError: a value is out of its range.
        """
        changes = self.given()
        if self.max_completion_tokens is not None:
            changes["max_tokens"] = self.max_completion_tokens
        if changes.get("max_tokens", 0) < 0:  # the server's own limit holds, as in llama.cpp's
            del changes["max_tokens"]
        changes |= {name: 0 for name in ("top_k", "penalty_window") if changes.get(name, 0) < 0}
        seed = changes.get("seed", 0)
        if -(MAX_SEED // 2) - 1 <= seed < 0:  # the API allows negative seeds
            changes["seed"] = None if seed == _RANDOM_SEED else seed % (MAX_SEED + 1)
        if self.stop is not None:
            changes["stop"] = _stops([self.stop] if isinstance(self.stop, str) else self.stop, limits)
        if self.logit_bias:
            pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
            # False is llama.cpp's way to forbid a token.
            biases = {token: float(-100 if bias is False else bias) for token, bias in pairs}
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


def _stops(texts: list[str], limits: Limits) -> tuple[str, ...]:
    if len(texts) > limits.stops or any(len(text) > limits.stop_length for text in texts):
        raise UsageError(
            "There are too many stop strings, or one is too long.",
            f"At most {limits.stops} of {limits.stop_length} characters each are allowed.",
        )
    return tuple(text for text in texts if text)
