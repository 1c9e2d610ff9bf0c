"""Models without weights: headers made of a well-known model's sizes, to plan for it before it is here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import BLOCK_SIZES, ArrayInfo, GGUFHeader, TensorInfo

_F32, _F16, _Q4_0, _Q5_0, _Q5_1, _Q8_0, _BF16, _MXFP4 = 0, 1, 2, 6, 7, 8, 30, 39
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_NL, _IQ4_XS = 10, 11, 12, 13, 14, 20, 23

# The types that llama.cpp chooses: of most matrices; of attn_v and ffn_down in some layers; of the output.
_TYPES = {
    "Q2_K": (_Q2_K, _Q4_K, _Q6_K),
    "Q3_K_S": (_Q3_K, _Q3_K, _Q6_K),
    "Q3_K_M": (_Q3_K, _Q5_K, _Q6_K),
    "IQ4_XS": (_IQ4_XS, _Q5_K, _Q6_K),
    "Q4_0": (_Q4_0, _Q4_0, _Q6_K),
    "Q4_K_S": (_Q4_K, _Q5_K, _Q6_K),
    "Q4_K_M": (_Q4_K, _Q6_K, _Q6_K),
    "Q5_K_S": (_Q5_K, _Q5_K, _Q6_K),
    "Q5_K_M": (_Q5_K, _Q6_K, _Q6_K),
    "Q6_K": (_Q6_K, _Q6_K, _Q6_K),
    "Q8_0": (_Q8_0, _Q8_0, _Q8_0),
    "MXFP4": (_Q8_0, _Q8_0, _Q8_0),  # except for the experts
    "F16": (_F16, _F16, _F16),
    "BF16": (_BF16, _BF16, _BF16),
}
QUANTIZATIONS = tuple(_TYPES)
"""Those whose types are known."""

# Where no block of 256 divides a row.
_OF_SHORT_BLOCKS = {_Q2_K: _IQ4_NL, _Q3_K: _IQ4_NL, _IQ4_XS: _IQ4_NL}
_OF_SHORT_BLOCKS |= {_Q4_K: _Q5_0, _Q5_K: _Q5_1, _Q6_K: _Q8_0}
_ALIGNMENT = 32
_STATE_HEAD = 128  # elements of a head of a running state
_CONVOLUTION = 4  # tokens that its convolution reaches over


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model: widths in elements.

    Attributes:
        feed_forward: of the block that every token passes through; of a mixture, of its shared experts.
        heads, kv_heads, head: of the layers with attention.
        tied: whether the embedding is the output matrix, too.
        experts, experts_used, expert_feed_forward: of each layer of a mixture.
        attention_every: of so many layers, one has attention and the others a running state.
        state_key_heads, state_value_heads: of those others.
        gated: whether queries come with a gate of their size.
        context: tokens that it was trained with.
    """

    architecture: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head: int = 128
    vocabulary: int = 151_936
    tied: bool = False
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    attention_every: int = 1
    state_key_heads: int = 0
    state_value_heads: int = 0
    gated: bool = False
    context: int = 32_768

    @property
    def _state_width(self) -> int:
        return self.state_value_heads * _STATE_HEAD

    def settings(self) -> dict[str, int]:
        """The metadata that plans depend on, by key without the architecture."""
        found = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "feed_forward_length": self.feed_forward or self.expert_feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
        }
        if self.experts:
            found["expert_count"] = self.experts
            found["expert_used_count"] = self.experts_used
            found["expert_feed_forward_length"] = self.expert_feed_forward
        if self.attention_every > 1:
            found["full_attention_interval"] = self.attention_every
            found["ssm.conv_kernel"] = _CONVOLUTION
            found["ssm.state_size"] = _STATE_HEAD
            found["ssm.group_count"] = self.state_key_heads
            found["ssm.time_step_rank"] = self.state_value_heads
            found["ssm.inner_size"] = self._state_width
        return found

    def matrices(self, quant: str = "Q4_K_M") -> dict[str, tuple[tuple[int, ...], int]]:
        """(shape, row length first; type) by name without ".weight", as llama.cpp chooses types.

        Args:
            quant: one of QUANTIZATIONS.
        """
        return {
            name: (shape, kind if shape[0] % BLOCK_SIZES[kind][0] == 0 else _OF_SHORT_BLOCKS[kind])
            for name, shape, kind in self._matrices(quant)
        }

    def _matrices(self, quant: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
        plain, finer, output = _TYPES[quant]
        stacked, finer_stacked = (_MXFP4, _MXFP4) if quant == "MXFP4" else (plain, finer)
        yield "token_embd", (self.width, self.vocabulary), output if self.tied else plain
        if not self.tied:
            yield "output", (self.width, self.vocabulary), output
        eighth = self.layers // 8
        for layer in range(self.layers):
            more = layer < eighth or layer >= self.layers - eighth or (layer - eighth) % 3 == 2
            down, down_stacked = (finer, finer_stacked) if more else (plain, stacked)
            at = f"blk.{layer}."
            if (layer + 1) % self.attention_every:
                keys = 2 * self.state_key_heads * _STATE_HEAD
                yield (
                    at + "attn_qkv",
                    (self.width, keys + self._state_width),
                    _Q5_K if plain == _Q4_K else plain,
                )
                yield at + "attn_gate", (self.width, self._state_width), plain
                yield at + "ssm_out", (self._state_width, self.width), plain
            else:
                queries, keys = self.heads * self.head, self.kv_heads * self.head
                yield at + "attn_q", (self.width, queries * (2 if self.gated else 1)), plain
                yield at + "attn_k", (self.width, keys), plain
                yield at + "attn_v", (self.width, keys), down
                yield at + "attn_output", (queries, self.width), plain
            if self.feed_forward:
                shared = "_shexp" if self.experts else ""
                yield f"{at}ffn_gate{shared}", (self.width, self.feed_forward), plain
                yield f"{at}ffn_up{shared}", (self.width, self.feed_forward), plain
                yield f"{at}ffn_down{shared}", (self.feed_forward, self.width), down
            if self.experts:
                inner = self.expert_feed_forward
                yield at + "ffn_gate_inp", (self.width, self.experts), _F32
                yield at + "ffn_gate_exps", (self.width, inner, self.experts), stacked
                yield at + "ffn_up_exps", (self.width, inner, self.experts), stacked
                yield at + "ffn_down_exps", (inner, self.width, self.experts), down_stacked


def hollow_files(name: str, shape: ModelShape, quant: str = "Q4_K_M") -> ModelFiles:
    """A model of this shape that is in no file: enough for a plan."""
    metadata: dict[str, Any] = {f"{shape.architecture}.{key}": n for key, n in shape.settings().items()}
    metadata["general.architecture"] = shape.architecture
    metadata["tokenizer.ggml.tokens"] = ArrayInfo("string", shape.vocabulary)
    tensors, at = [], 0
    for tensor, (sizes, kind) in shape.matrices(quant).items():
        elements, block_bytes = BLOCK_SIZES[kind]
        n_bytes = math.prod(sizes) // elements * block_bytes
        tensors.append(TensorInfo(f"{tensor}.weight", sizes, kind, at, n_bytes))
        at += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
    header = GGUFHeader(
        Path(f"{name}.gguf"), 3, metadata, tuple(tensors), _ALIGNMENT, 0, at, f"hollow {name}"
    )
    return ModelFiles((header,))
