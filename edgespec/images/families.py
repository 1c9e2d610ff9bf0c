"""Types of projectors, and models they belong to: a wrong one of the right width gives meaningless rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Architectures of models, by the type of the projector that llama.cpp's converter writes for them alone.
_MODELS: dict[str, tuple[str, ...]] = {
    "cogvlm": ("cogvlm",),
    "gemma3": ("gemma3",),
    "gemma3nv": ("gemma3n",),
    "gemma4uv": ("gemma4",),
    "gemma4v": ("gemma4",),
    "hunyuanvl": ("hunyuan_vl",),
    "llama4": ("llama4",),
    "minicpmv4_6": ("qwen35",),
    "paddleocr": ("paddleocr",),
    "qwen2.5o": ("qwen2vl",),
    "qwen2.5vl_merger": ("qwen2vl",),
    "qwen2vl_merger": ("qwen2vl",),
    "qwen3vl_merger": ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp"),
}
_BASE_NAME = "general.basename"
_MADE_OF = re.compile(r"general\.base_model\.\d+\.name")
_WITH_THEIR_OWN = {architecture for found in _MODELS.values() for architecture in found}
_OF_ANY_MODEL = ("adapter", "internvl", "ldp", "ldpv2", "mlp", "mlp_norm", "pixtral", "resampler")


def go_together(projector: str, architecture: str) -> bool:
    """False if a projector of that type cannot be that of a model of that architecture."""
    if projector in _MODELS:
        return architecture in _MODELS[projector]
    return architecture not in _WITH_THEIR_OWN or projector in _OF_ANY_MODEL


def another_model(projector: Mapping[str, Any], kind: str, target: Mapping[str, Any]) -> str:
    """The model that a projector states as its own, if that is another than the target; else empty.

    llama.cpp's converter writes the same base name into both files. Fine-tuned models often have another one
    than their projector, but name the model that they were made of. Types that belong to certain
    architectures decide without names.

    Args:
        projector, target: metadata of the files.
        kind: type of the projector.
    """
    stated = projector.get(_BASE_NAME)
    if kind in _MODELS or not isinstance(stated, str) or not _plain(stated):
        return ""
    if not isinstance(target.get(_BASE_NAME), str):
        return ""
    theirs = {_plain(name) for name in (stated, *_made_of(projector))}
    ours = {_plain(name) for name in (target[_BASE_NAME], target.get("general.name"), *_made_of(target))}
    related = any(one in other or other in one for one in theirs - {""} for other in ours - {""})
    return "" if related else stated


def _made_of(metadata: Mapping[str, Any]) -> Iterator[object]:
    """Names of the models that a file's model was made of."""
    return (value for key, value in metadata.items() if _MADE_OF.fullmatch(key))


def _plain(name: object) -> str:
    """A name without what people write in different ways."""
    return re.sub(r"[^a-z0-9]", "", name.lower()) if isinstance(name, str) else ""
