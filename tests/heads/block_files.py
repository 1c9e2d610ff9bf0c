"""Writing a block head's GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.heads.block_reference import BlockShape
from tests.heads.eagle_file import AddVocabulary, FloatArray
from tests.heads.files import N_LAYERS, WIDTH
from tests.tiny import finish
from tests.tiny_hybrid import N_VOCAB

SHAPE = BlockShape(
    layers=(1, 2, N_LAYERS - 1),
    width=WIDTH,
    n_layers=2,
    heads=4,
    heads_kv=2,
    head=16,
    hidden=96,
    n_vocab=N_VOCAB,
    block_size=6,
    mask=0,
    top_k=0,
)
"""Sizes for the target of `heads.sample.write_target`."""


def write_block_head(
    path: Path,
    shape: BlockShape,
    weights: Mapping[str, FloatArray],
    add_vocabulary: AddVocabulary,
    *,
    drafted: NDArray[np.int64] | None = None,
    rope_sections: bool = False,
) -> Path:
    """A block head as llama.cpp loads it, in single precision.

    Args:
        weights: by their names, rows first; see BlockShape.tensors. It borrows the target's embedding and
            output, unless it has an `output.weight`.
        add_vocabulary: adds the target's, which the loader wants.
        drafted: (n_drafted,) the target's id of each drafted token; None if they are all of its tokens.
        rope_sections: whether its positions have several parts, as for targets that read images.
    """
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_block_count(shape.n_layers)
    shape.describe(writer)
    if rope_sections:
        writer.add_rope_dimension_sections([shape.head // 2, 0, 0, 0])
    writer.add_array("dflash.target_layers", list(shape.layers))
    writer.add_uint32("dflash.block_size", shape.block_size)
    if shape.causal:
        writer.add_causal_attention(True)
    if shape.top_k:
        writer.add_uint32("dflash.conv_kernel_size", shape.kernel)
        writer.add_uint32("dflash.conv_group_size", shape.group)
        writer.add_uint32("dflash.selector_rank", shape.rank)
        writer.add_uint32("dflash.selector_top_k", shape.top_k)
    add_vocabulary(writer)
    writer.add_mask_token_id(shape.mask)
    if drafted is not None:
        writer.add_tensor("d2t", drafted, raw_dtype=gguf.GGMLQuantizationType.I64)
    for name, values in weights.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    finish(writer)
    return path
