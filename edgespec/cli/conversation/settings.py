"""Settings of a chat by name, for /set and /show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edgespec.config import OPTIONS
from edgespec.errors import InvalidValueError, UsageError, did_you_mean
from edgespec.generation.config import NOT_SETTINGS, GenerationConfig
from edgespec.generation.rules import KINDS
from edgespec.generation.thinking import EFFORTS

_DEFAULTS = {n: value for n, value in asdict(GenerationConfig()).items() if n not in NOT_SETTINGS}
_BUDGET = "tree_budget"
# Short names, and those of other programs.
_ALIASES = {
    "budget": _BUDGET,
    "temp": "temperature",
    "n": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_last_n": "penalty_window",
    "ban_string": "banned_strings",
    "dry_sequence_breaker": "dry_sequence_breakers",
}
AS_AT_START = "default"
_NOTHING = ("none", "off", "auto", "random")

_SAMPLED = (
    *("temperature", "top_n_sigma", "top_k", "top_p", "min_p", "xtc_probability"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier"),
)

NAMES = (*_DEFAULTS, _BUDGET, "system")


def is_budget(name: str) -> bool:
    """True if this is the tree budget, which is a setting of the engine."""
    return name_of(name) == _BUDGET


def name_of(typed: str) -> str:
    """The setting's own name, from however it was typed: as an option, or as in other programs."""
    name = typed.removeprefix("--").replace("-", "_")
    return _ALIASES.get(name, name)


def parse_budget(value: str) -> int | None:
    """Nodes a pass; None means auto."""
    if value.strip().lower() in (*_NOTHING, AS_AT_START):
        return None
    try:
        budget: int = OPTIONS[_BUDGET].read(value)
    except InvalidValueError as error:
        raise error.renamed(_BUDGET) from None
    return budget


def changed(config: GenerationConfig, name: str, value: str, at_start: GenerationConfig) -> GenerationConfig:
    """The settings with one changed; "default" takes its value from those at the start of the chat."""
    field = name_of(name)
    if field not in _DEFAULTS:
        raise unknown(name)
    if value.lower() == AS_AT_START:
        return config.with_(**{field: getattr(at_start, field)})
    if field == "verify":
        _check_rule(value)
    return config.with_(**{field: _parse(field, value)})


def values_of(name: str) -> list[str]:
    """Words that the setting takes, for completion."""
    field = name_of(name)
    if field == "verify":
        return [*KINDS]
    if field == "think":
        return ["auto", "on", "off", *EFFORTS]
    words = {
        "tree_budget": ["auto"],
        "max_tokens": ["none"],
        "seed": ["random"],
        "stop": ["none"],
        "banned_strings": ["none"],
    }
    return [*words.get(field, []), *([AS_AT_START] if field in _DEFAULTS else [])]


def unknown(name: str) -> UsageError:
    """The error for a name that is not that of a setting."""
    hint = did_you_mean(name_of(name), NAMES, f"Settings: {', '.join(NAMES)}.")
    return UsageError(f"There is no setting '{name}'.", hint)


def shown(config: GenerationConfig, sources: Mapping[str, str]) -> dict[str, str]:
    """Every setting, with where it comes from unless it is the library's default.

    Args:
        sources: by the settings' names.
    """
    return {
        name: _text(name, getattr(config, name)) + (f" ({sources[name]})" if name in sources else "")
        for name in _DEFAULTS
    }


def without_source(shown: str) -> str:
    """A value as `shown` gives it, without the source in brackets."""
    return re.sub(r" \([^()]*\)$", "", shown)


def unquoted(value: str, marks: str = '"') -> str:
    """A value without the quotes around it; those that are part of it stay."""
    mark = value[:1]
    is_quoted = mark in marks and value.endswith(mark) and value.count(mark) == 2
    return value[1:-1] if is_quoted else value


def sampling_in_words(config: GenerationConfig, sources: Mapping[str, str]) -> str:
    """Describe how tokens are chosen, and where that comes from, in a line."""
    if not config.draws:
        text = "greedy: always the likeliest token"
        return f"{text} ({sources['temperature']})" if "temperature" in sources else text
    names = [name for name in _SAMPLED if getattr(config, name) != _DEFAULTS[name]]
    by_source: dict[str, list[str]] = {}
    for name in names:
        value = f"{name} {getattr(config, name):g}"
        by_source.setdefault(sources.get(name, ""), []).append(value)
    return "; ".join(
        ", ".join(values) + (f" ({source})" if source else "") for source, values in by_source.items()
    )


def _check_rule(value: str) -> None:
    name = value.partition(":")[0]
    if name not in KINDS and name not in _NOTHING:
        rules = f"Rules: {', '.join(KINDS)}."
        hint = f"{did_you_mean(name, KINDS, '')} {rules}".lstrip()
        raise UsageError(f"There is no verification rule '{name}'.", hint)


def _parse(field: str, value: str) -> Any:
    default = _DEFAULTS[field]
    if field == "think":  # where "off" is not the default
        return value
    if value.lower() in _NOTHING:
        return () if isinstance(default, tuple) else default
    if isinstance(default, str):
        return value
    if isinstance(default, tuple):
        return (unquoted(value).replace("\\n", "\n"),)
    try:
        return float(value) if isinstance(default, float) else int(value)
    except ValueError as error:
        number = "a number" if isinstance(default, float) else "an integer"
        raise UsageError(f"{field} must be {number}, not '{value}'.") from error


def _text(name: str, value: Any) -> str:
    if name == "seed" and value is None:
        return "random"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
