"""Sampling settings that a model's maker recommends: from the GGUF file, or else by the model's family.

The figures are those of the makers' model cards and generation configurations. A GGUF file may have its own
(`general.sampling.*`), which win.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.models.gguf.types import GGUFHeader

_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "penalty_window",
}


@dataclass(frozen=True)
class Recommendation:
    """Recommended settings.

    Attributes:
        values: by their names in GenerationConfig; empty if nothing is known.
        sources: where each comes from, for people.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


def recommended_sampling(header: GGUFHeader) -> Recommendation:
    """What is recommended for the model with this header."""
    name, by_family = _of_family(header)
    in_file = _of_file(header)
    sources = dict.fromkeys(by_family, f"recommended for {name}") | dict.fromkeys(
        in_file, "from the model file"
    )
    return Recommendation({**by_family, **in_file}, sources)


def _of_file(header: GGUFHeader) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, name in _KEYS.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(getattr(GenerationConfig(), name), int):
            value = max(int(value), 0)  # -1 means all in llama.cpp, and 0 does here
        elif isinstance(value, float):
            value = round(value, 6)  # it was stored with 32 bits
        try:
            GenerationConfig().with_(**{name: value})
        except UsageError:  # nonsense in a file must not keep it from being used
            continue
        found[name] = value
    return found


def _of_family(header: GGUFHeader) -> tuple[str, Mapping[str, float]]:
    words = [
        header.architecture,
        *(header.metadata.get(f"general.{key}") for key in _NAMED),
        header.path.stem,
    ]
    text = " / ".join(str(word) for word in words if word).lower()
    template = str(header.metadata.get("tokenizer.chat_template", ""))
    for family in _FAMILIES:
        if re.search(family.pattern, text) and family.fits(text, template):
            return family.name, family.values
    return "", {}


_NAMED = ("basename", "name", "finetune")


def _always(_text: str, _template: str) -> bool:
    return True


def _thinks(text: str, template: str) -> bool:
    """Whether a Qwen 3 model thinks unless it is told not to."""
    return "thinking" in text or "enable_thinking" in template


@dataclass(frozen=True)
class _Family:
    name: str
    pattern: str
    values: Mapping[str, float]
    fits: Callable[[str, str], bool] = _always


def _values(temperature: float, top_p: float = 1.0, top_k: int = 0, **more: float) -> dict[str, float]:
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k, **more}


# The first that fits counts: distilled models are named after both of their parents.
_FAMILIES = (
    _Family("DeepSeek R1", r"deepseek.?r1|r1.?distill", _values(0.6, 0.95)),
    _Family("gpt-oss", r"gpt.?oss", _values(1.0)),
    _Family("QwQ", r"\bqwq", _values(0.6, 0.95, 40)),
    _Family("Qwen 3 Coder", r"qwen.?3.?coder", _values(0.7, 0.8, 20, repeat_penalty=1.05)),
    _Family("Qwen 3, thinking", r"qwen.?3(?![.\d])", _values(0.6, 0.95, 20), _thinks),
    _Family("Qwen 3, not thinking", r"qwen.?3(?![.\d])", _values(0.7, 0.8, 20)),
    _Family("Qwen 2.5 Coder", r"qwen.?2\.5.?coder", _values(0.7, 0.8, 20, repeat_penalty=1.1)),
    _Family("Qwen 2.5", r"qwen.?2\.5", _values(0.7, 0.8, 20, repeat_penalty=1.05)),
    _Family("SmolLM3", r"smollm.?3", _values(0.6, 0.95)),
    _Family("SmolLM2", r"smollm", _values(0.2, 0.9)),
    _Family("Llama 3", r"llama.?3(\.\d)?\b", _values(0.6, 0.9)),
    _Family("Gemma 3", r"gemma.?3", _values(1.0, 0.95, 64)),
    _Family("Magistral", r"magistral", _values(0.7, 0.95)),
    _Family("Mistral Small", r"mistral.?small", _values(0.15)),
    _Family("Mistral Nemo", r"mistral.?nemo", _values(0.3)),
    _Family("Mistral", r"mistral|mixtral|ministral", _values(0.7)),
    _Family("Phi 4, reasoning", r"phi.?4.*reasoning", _values(0.8, 0.95, 50)),
)
