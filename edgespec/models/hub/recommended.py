"""Sampling settings that a model's maker recommends: from the GGUF file, or else by the model's family.

The figures are those of the makers' model cards and generation configurations: see docs/models.md. A GGUF
file may have its own (`general.sampling.*`), which win.
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
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "penalty_window",
}


@dataclass(frozen=True)
class RecommendedSampling:
    # by their names in GenerationConfig; empty if nothing is known
    values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # where each comes from, for people


def recommended_sampling(header: GGUFHeader, *, thinks: bool | None = None) -> RecommendedSampling:
    """The settings recommended for the model with this header.

    Args:
        thinks: whether it is told to think, where it can be told; None leaves that to its template.
    """
    name, by_family = _of_family(header, thinks)
    in_file = _of_file(header)
    sources = dict.fromkeys(by_family, f"recommended for {name}") | dict.fromkeys(
        in_file, "from the model file"
    )
    return RecommendedSampling({**by_family, **in_file}, sources)


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


def _of_family(header: GGUFHeader, thinks: bool | None) -> tuple[str, Mapping[str, float]]:
    words = [
        header.architecture,
        *(header.metadata.get(f"general.{key}") for key in _NAMED),
        header.path.stem,
    ]
    text = " / ".join(str(word) for word in words if word).lower()
    template = str(header.metadata.get("tokenizer.chat_template", ""))
    for family in FAMILIES:
        if re.search(family.pattern, text) and family.fits(text, template, thinks):
            return family.name, family.values
    return "", {}


_NAMED = ("basename", "name", "finetune")


def _always(_text: str, _template: str, _thinks: bool | None) -> bool:
    return True


def _is_hybrid(_text: str, template: str, _thinks: bool | None) -> bool:
    """Check that a Qwen 3 model can be told to think or not."""
    return "enable_thinking" in template


def _hybrid_thinks(text: str, template: str, thinks: bool | None) -> bool:
    return _is_hybrid(text, template, thinks) and thinks is not False


def _told_not(_text: str, _template: str, thinks: bool | None) -> bool:
    return thinks is False


def _only_thinks(text: str, _template: str, _thinks: bool | None) -> bool:
    return "thinking" in text


@dataclass(frozen=True)
class ModelFamily:
    """The settings recommended for the models of a family."""

    name: str  # as people know it
    pattern: str  # what is searched in the model's architecture and names, in small letters
    values: Mapping[str, float]  # by their names in GenerationConfig
    # by these names, its chat template, and whether it is told to think
    fits: Callable[[str, str, bool | None], bool] = _always


def _values(temperature: float, top_p: float = 1.0, top_k: int = 0, **more: float) -> dict[str, float]:
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k, **more}


_QWEN3 = r"qwen.?3(?![.\d])"

# The first that fits counts: distilled models are named after both of their parents.
FAMILIES = (
    ModelFamily("DeepSeek R1", r"deepseek.?r1|r1.?distill", _values(0.6, 0.95)),
    ModelFamily("gpt-oss", r"gpt.?oss", _values(1.0)),
    ModelFamily("QwQ", r"\bqwq", _values(0.6, 0.95, 40)),
    ModelFamily("Qwen 3 Coder Next", r"qwen.?3.?coder.?next", _values(1.0, 0.95, 40)),
    ModelFamily("Qwen 3 Coder", r"qwen.?3.?coder", _values(0.7, 0.8, 20, repeat_penalty=1.05)),
    ModelFamily(
        "Qwen 3, told to think", _QWEN3, _values(0.6, 0.95, 20, presence_penalty=1.5), _hybrid_thinks
    ),
    ModelFamily("Qwen 3, told not to think", _QWEN3, _values(0.7, 0.8, 20, presence_penalty=1.5), _is_hybrid),
    ModelFamily(
        "Qwen 3.8, told not to think", r"qwen.?3\.8", _values(0.7, 0.8, 20, presence_penalty=1.5), _told_not
    ),
    ModelFamily("Qwen 3.8", r"qwen.?3\.8", _values(1.0, 0.95, 20)),
    ModelFamily("Qwen 3 Thinking", _QWEN3, _values(0.6, 0.95, 20), _only_thinks),
    ModelFamily("Qwen 3 Instruct", _QWEN3, _values(0.7, 0.8, 20)),
    ModelFamily("Qwen 2.5 Coder 32B", r"qwen.?2\.5.?coder.?32b", _values(0.7, 0.8, 20, repeat_penalty=1.05)),
    ModelFamily("Qwen 2.5 Coder", r"qwen.?2\.5.?coder", _values(0.7, 0.8, 20, repeat_penalty=1.1)),
    ModelFamily("Qwen 2.5", r"qwen.?2\.5", _values(0.7, 0.8, 20, repeat_penalty=1.05)),
    ModelFamily("GLM 4.5", r"glm.?4\.5", _values(0.6, 0.95)),
    ModelFamily("GLM 4.6 and 4.7", r"glm.?4\.[67]", _values(1.0, 0.95)),
    ModelFamily("SmolLM3", r"smollm.?3", _values(0.6, 0.95)),
    ModelFamily("SmolLM2", r"smollm", _values(0.2, 0.9)),
    ModelFamily("Llama 3", r"llama.?3(\.\d)?\b", _values(0.6, 0.9)),
    ModelFamily("Gemma 3 and 4", r"gemma.?[34](?!\d)", _values(1.0, 0.95, 64)),
    ModelFamily("Magistral", r"magistral", _values(0.7, 0.95)),
    ModelFamily("Mistral Small", r"mistral.?small", _values(0.15)),
    ModelFamily("Mistral Nemo", r"mistral.?nemo", _values(0.3)),
    ModelFamily("Mistral", r"mistral|mixtral|ministral", _values(0.7)),
    ModelFamily("Phi 4, reasoning", r"phi.?4.*reasoning", _values(0.8, 0.95, 50)),
)
