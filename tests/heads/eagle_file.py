"""Writing the GGUF file of an EAGLE-3 head, as llama.cpp loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.tiny import finish

FloatArray = NDArray[np.float32]
AddVocabulary = Callable[[gguf.GGUFWriter], None]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of layers with attention.

    Attributes:
        width: elements of a hidden state.
        heads, heads_kv, head: attention heads of queries, those of keys and values, and elements of each.
        hidden: elements between the matrices of a feed-forward block.
    """

    width: int
    heads: int
    heads_kv: int
    head: int
    hidden: int
    n_context: int = 2048
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Add the sizes to the metadata of a model."""
        writer.add_context_length(self.n_context)
        writer.add_embedding_length(self.width)
        writer.add_feed_forward_length(self.hidden)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.heads_kv)
        writer.add_key_length(self.head)
        writer.add_value_length(self.head)
        writer.add_rope_dimension_count(self.head)
        writer.add_rope_freq_base(self.rope_base)
        writer.add_layer_norm_rms_eps(self.epsilon)


@dataclass(frozen=True, kw_only=True)
class HeadShape(LayerShape):
    """The sizes of a head.

    Attributes:
        layers: of the target, whose inputs it reads.
        target_width: elements of the target's hidden states.
        n_drafted: tokens that it drafts.
        norm_before_residual: whether features are normalized before they are added, too.
    """

    layers: tuple[int, ...]
    target_width: int
    n_drafted: int
    norm_before_residual: bool = False

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, rows first, by their names in a GGUF file."""
        query, key = self.heads * self.head, self.heads_kv * self.head
        return {
            "fc.weight": (self.width, len(self.layers) * self.target_width),
            "blk.0.attn_norm.weight": (self.width,),
            "blk.0.attn_norm_2.weight": (self.width,),
            "blk.0.attn_q.weight": (query, 2 * self.width),
            "blk.0.attn_k.weight": (key, 2 * self.width),
            "blk.0.attn_v.weight": (key, 2 * self.width),
            "blk.0.attn_output.weight": (self.width, query),
            "blk.0.ffn_norm.weight": (self.width,),
            "blk.0.ffn_gate.weight": (self.hidden, self.width),
            "blk.0.ffn_up.weight": (self.hidden, self.width),
            "blk.0.ffn_down.weight": (self.width, self.hidden),
            "output_norm.weight": (self.width,),
            "output.weight": (self.n_drafted, self.width),
        }


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
    shape.describe(writer)
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
    finish(writer)
    return path
