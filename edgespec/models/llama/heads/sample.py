"""Writing a head's GGUF file, and a tiny pair of target and head with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.models.llama.heads.reference import FloatArray, HeadShape

AddVocabulary = Callable[[gguf.GGUFWriter], None]

WIDTH, N_LAYERS, N_VOCAB = 64, 4, 3 + 256
SHAPE = HeadShape(
    layers=(1, 2, 3), target_width=WIDTH, width=WIDTH, heads=4, heads_kv=2, head=16, hidden=96, n_drafted=100
)


def write_head(
    path: Path,
    shape: HeadShape,
    weights: Mapping[str, FloatArray],
    add_vocabulary: AddVocabulary,
    *,
    drafted: NDArray[np.int64] | None,
    type_id: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A head as llama.cpp loads it.

    Args:
        weights: by their names, rows first; see HeadShape.tensors. With its own `token_embd.weight`, it does
            not borrow the target's.
        add_vocabulary: adds the target's, which the loader wants.
        drafted: (n_drafted,) the target's id of each drafted token; None if they are all of its tokens.
        type_id: of matrices.
    """
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_block_count(1)
    writer.add_context_length(shape.n_context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_array("eagle3.target_layers", list(shape.layers))
    writer.add_uint32("eagle3.target_hidden_size", shape.target_width)
    writer.add_bool("eagle3.norm_before_residual", shape.norm_before_residual)
    add_vocabulary(writer)
    for name, values in weights.items():
        if values.ndim == 1 or type_id == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(values, type_id), raw_dtype=type_id)
    if drafted is not None:
        writer.add_tensor("d2t", np.asarray(drafted, dtype=np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
    write_file(writer)
    return path


def write_target(path: Path, embedding: FloatArray, rng: np.random.Generator, name: str = "tiny") -> Path:
    """A llama of a few layers with random weights, and a vocabulary of bytes."""
    heads, hidden = SHAPE.heads, SHAPE.hidden
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(SHAPE.n_context)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(SHAPE.epsilon)
    writer.add_rope_dimension_count(WIDTH // heads)
    add_bytes(writer)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, dtype=np.float32))
    for layer in range(N_LAYERS):
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH)
        )
        shapes |= {"ffn_gate": (hidden, WIDTH), "ffn_up": (hidden, WIDTH), "ffn_down": (WIDTH, hidden)}
        shapes |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        for name, shape in shapes.items():
            values = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * shape[-1] ** -0.5
            writer.add_tensor(f"blk.{layer}.{name}.weight", values.astype(np.float32))
    write_file(writer)
    return path


def add_bytes(writer: gguf.GGUFWriter) -> None:
    """A vocabulary with a token for every byte."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))])
    writer.add_token_scores([0.0] * N_VOCAB)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_file(writer: gguf.GGUFWriter) -> None:
    """Write all that was added to a file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
