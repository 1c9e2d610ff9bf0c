"""Writing a tiny Gemma 4, and an assistant that drafts for it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from edgespec.heads.assistant import TARGET
from tests.heads.eagle_file import AddVocabulary
from tests.heads.gemma_reference import GemmaShape, Weights
from tests.tiny import finish


def write_gemma(
    path: Path,
    shape: GemmaShape,
    weights: Weights,
    add_vocabulary: AddVocabulary,
    type_id: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write a Gemma 4, or an assistant if its shape has a target's width; returns its path.

    Args:
        weights: by their names, rows first; see GemmaShape.tensors.
        type_id: of matrices.
    """
    architecture = "gemma4-assistant" if shape.target_width else TARGET
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(len(shape.sliding))
    shape.describe(writer)
    for key, value in {
        "attention.key_length_swa": shape.sliding_head,
        "attention.value_length_swa": shape.sliding_head,
        "rope.dimension_count_swa": shape.sliding_head,
        "attention.sliding_window": shape.window,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    }.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base_swa", shape.sliding_rope_base)
    writer.add_array(f"{architecture}.attention.sliding_window_pattern", list(shape.sliding))
    if shape.target_width:
        writer.add_uint32(f"{architecture}.embedding_length_out", shape.target_width)
        writer.add_uint32(f"{architecture}.nextn_predict_layers", len(shape.sliding))
    add_vocabulary(writer)
    for name, values in weights.items():
        if values.ndim == 1 or type_id == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(values, type_id), raw_dtype=type_id)
    finish(writer)
    return path
