"""Buffer-type overrides for weights to which llama.cpp's loader would give a slower kernel layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.layouts import (
    KernelLayout,
    follows_ggml,
    supporting_layouts,
    weight_layout,
)
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, pattern_of
from edgespec.models.gguf.types import TensorInfo

_OUTPUT, _LAYERS = "output.weight", "blk."


def layout_overrides(
    path: Path, gpu_layers: int, layouts: Sequence[KernelLayout], kept_names: Collection[str] = ()
) -> list[tuple[str, Address]]:
    """Overrides (regular expression, buffer type) for a model that is loaded with these layouts.

    llama.cpp gives each weight the first layout that can hold it; these are the weights for which another one
    was measured to be faster. Usually there are none. The two uses of a tied embedding have one name and
    cannot be told apart, so it keeps llama.cpp's choice.

    Args:
        gpu_layers: on devices, the output included.
        kept_names: of weights of these layers that are not on devices.
    """
    if follows_ggml(layouts):
        return []
    header = read_header(path)
    count = header.block_count or 0
    # llama.cpp counts the output as one more layer, the first that it hands to the GPU.
    first_on_gpu = max(count + 1 - gpu_layers, 0)
    groups: dict[Address, list[str]] = {}
    files = ModelFiles.of(header)
    for part in (*files.headers, *(files.mtp.headers if files.mtp else ())):
        for tensor in part.tensors:
            if _layer_of(tensor, count) >= first_on_gpu and tensor.name not in kept_names:
                continue
            able = [x for x in supporting_layouts(tensor.type_id, tensor.shape) if x in layouts]
            chosen = weight_layout(tensor.name, tensor.type_id, tensor.shape, layouts)
            if able and chosen != able[0]:
                buffer_type = chosen.address if chosen else ggml.plain_buffer_type()
                groups.setdefault(buffer_type, []).append(tensor.name)
    patterns = []
    for buffer_type, names in groups.items():
        expressions = pattern_of(name for name in names if name.startswith(_LAYERS))
        expressions += [f"^{re.escape(name)}$" for name in names if not name.startswith(_LAYERS)]
        patterns += [(expression, buffer_type) for expression in expressions]
    return patterns


def output_override(path: Path, layouts: Sequence[KernelLayout]) -> list[tuple[str, Address]]:
    """The override that gives the output the fastest of these layouts, where all else is as in the file."""
    for part in ModelFiles.of(read_header(path)).headers:
        for tensor in part.tensors:
            if tensor.name == _OUTPUT:
                chosen = weight_layout(tensor.name, tensor.type_id, tensor.shape, layouts)
                return [] if chosen is None else [(f"^{re.escape(_OUTPUT)}$", chosen.address)]
    return []


def _layer_of(tensor: TensorInfo, count: int) -> float:
    """The layer of a matrix, `count` for the output and stacks beside the layers.

    Infinity for what must not be overridden.
    """
    parts = tensor.name.split(".")
    if tensor.name.startswith(_LAYERS):
        return int(parts[1]) if parts[1].isdigit() and parts[-1] == "weight" else float("inf")
    return count if tensor.name == _OUTPUT or len(tensor.shape) == 3 else float("inf")
