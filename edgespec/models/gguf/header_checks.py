"""Checks of header settings that llama.cpp trusts, and that would bring it down.

The fuzz campaign (tests/fuzz) found them. What llama.cpp answers with an error is left to it; here is only
what it would answer with an abort, a crash or unbounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.models.gguf.types import TensorInfo

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS = 1024
_MAX_ROTATED = 2**14
_ROTATING = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2")

# Types that ggml stores or computes with but has no matrix products for: 8- to 64-bit integers, F64, and the
# quantizations of activations.
_NO_WEIGHTS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_NEED_EXPERTS = ("smallthinker", "bailingmoe2")
_F32 = 0  # the type of norms and biases, which are multiplied and added element by element
_TABLES = ("tid2eid",)  # of ids, which are integers
D2T = "d2t"  # of a draft head, likewise


def find_fault(metadata: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> str:
    """The first setting that would bring llama.cpp down, as a clause; empty if there is none."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return ""  # later files of a split model have no settings

    def setting(name: str) -> Any:
        return metadata.get(f"{architecture}.{name}")

    layers = setting("block_count")
    if _is_count(layers) and not 1 <= layers <= _MAX_LAYERS:
        return f"it claims {layers} layers; from 1 to {_MAX_LAYERS} are allowed"
    extra = setting("nextn_predict_layers")
    if _is_count(extra) and _is_count(layers) and extra > layers:
        return f"it claims that {extra} of {layers} layers predict further tokens"
    fault = _vocabulary_fault(metadata) or _expert_fault(
        setting("expert_count"), setting("expert_used_count")
    )
    fault = fault or _group_fault(
        setting("expert_count"), setting("expert_group_count"), setting("expert_group_used_count")
    )
    if fault:
        return fault
    if architecture in _NEED_EXPERTS and not setting("expert_count"):
        return f"its architecture is {architecture}, and it has no experts"
    rotated = setting("rope.dimension_count")
    if _is_count(rotated) and (
        rotated % 2 or rotated > _MAX_ROTATED or (rotated == 0 and architecture in _ROTATING)
    ):
        return f"rope.dimension_count is {rotated}"
    for name in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        epsilon = setting(name)
        if isinstance(epsilon, float) and not (math.isfinite(epsilon) and epsilon >= 0):
            return f"{name} is {epsilon}"
    return next(filter(None, map(_type_fault, tensors)), "")


def _type_fault(tensor: TensorInfo) -> str:
    if any(table in tensor.name for table in _TABLES) or tensor.name == D2T:
        return ""
    if tensor.type_id in _NO_WEIGHTS:
        return f"tensor {tensor.name!r} has type {_NO_WEIGHTS[tensor.type_id]}, which weights never have"
    if len(tensor.shape) == 1 and tensor.type_id != _F32:
        return f"tensor {tensor.name!r} is a vector of type {tensor.type_id} instead of F32"
    return ""


def _expert_fault(count: Any, used: Any) -> str:
    if not _is_count(count if count is not None else 0) or not _is_count(used if used is not None else 0):
        return ""
    count, used = count or 0, used or 0
    if count > _MAX_EXPERTS:
        return f"it claims {count} experts; at most {_MAX_EXPERTS} are allowed"
    if used > count or (count and not used):
        return f"it claims that {used} of {count} experts are used"
    return ""


def _group_fault(experts: Any, groups: Any, used: Any) -> str:
    experts, groups, used = experts or 0, groups or 0, used or 0
    if not all(map(_is_count, (experts, groups, used))):
        return ""
    if groups and groups >= experts:
        return f"it claims {groups} groups of {experts} experts"
    if groups > 1 and experts % groups:
        return f"it claims {experts} experts in {groups} groups of the same size"
    if groups > 1 and not 0 < used < groups:
        return f"it claims that {used} of {groups} groups of experts are used"
    return ""


def _vocabulary_fault(metadata: Mapping[str, Any]) -> str:
    model, words = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model in ("none", "no_vocab"):
        return "it has no vocabulary, so it cannot read or write text"
    if words == "whitespace" and model != "whitespace":
        return f"its vocabulary is of kind {model!r}, and its texts would be split for another kind"
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
