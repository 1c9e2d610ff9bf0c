"""Types of projectors, and models they belong to: a wrong one of the right width gives meaningless rows."""

from __future__ import annotations

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
_WITH_THEIR_OWN = {architecture for found in _MODELS.values() for architecture in found}
_OF_ANY_MODEL = ("adapter", "internvl", "ldp", "ldpv2", "mlp", "mlp_norm", "pixtral", "resampler")


def go_together(projector: str, architecture: str) -> bool:
    """False if a projector of that type cannot be that of a model of that architecture."""
    if projector in _MODELS:
        return architecture in _MODELS[projector]
    return architecture not in _WITH_THEIR_OWN or projector in _OF_ANY_MODEL
