"""A tiny hybrid model with random weights: layers with a running state, and one with attention.

Written where several sequences of such models are tried. Its graph multiplies weights with activations that
have an axis of sequences, which those of other models do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.tiny import finish

WIDTH = 256  # a block of every quantization
N_VOCAB = 3 + 256
_ARCHITECTURE = "qwen35"
HIDDEN, HEADS, HEADS_KV, HEAD = 256, 4, 2, 64
_KEY_HEADS, _VALUE_HEADS, _STATE, _CONVOLVED = 2, 4, 64, 4
_LAYERS = 4  # every fourth has attention
_KEYS, _VALUES = _KEY_HEADS * _STATE, _VALUE_HEADS * _STATE

FloatArray = NDArray[np.float32]
Quantize = Callable[[FloatArray], bytes | None]


def write_tiny_hybrid(
    path: Path,
    type_id: int,
    quantize: Quantize,
    mtp: Mapping[str, FloatArray] | None = None,
    weights: Mapping[str, FloatArray] | None = None,
) -> Path:
    """A Qwen 3.5 of four layers; returns its path.

    Args:
        type_id: of its matrices.
        quantize: gives the bytes of (rows, row length) weights in that type.
        mtp: the weights of a layer for multi-token prediction behind these, by their names in the layer.
        weights: of the model, as `random_hybrid` names them; None makes random ones.
    """
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_block_count(_LAYERS + (mtp is not None))
    if mtp is not None:
        writer.add_uint32(f"{_ARCHITECTURE}.nextn_predict_layers", 1)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_array(f"{_ARCHITECTURE}.rope.dimension_sections", [HEAD // 8] * 4)
    writer.add_ssm_conv_kernel(_CONVOLVED)
    writer.add_ssm_inner_size(_VALUES)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_VALUE_HEADS)
    writer.add_ssm_group_count(_KEY_HEADS)
    add_bytes(writer)
    for name, values in (weights or random_hybrid()).items():
        shape = values.shape
        data = quantize(values) if _is_matrix(name, shape) else None
        if data is None:
            writer.add_tensor(name, values)
        else:
            rows = np.frombuffer(data, dtype=np.uint8).reshape(shape[0], -1)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType(type_id))
    for name, values in (mtp or {}).items():
        writer.add_tensor(f"blk.{_LAYERS}.{name}", values)
    finish(writer)
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


def random_hybrid() -> dict[str, FloatArray]:
    """Random weights of the model, rows first."""
    rng = np.random.default_rng(1)
    return {name: _values(name, shape, rng) for name, shape in _shapes().items()}


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (N_VOCAB, WIDTH),
        "output.weight": (N_VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    convolved = 2 * _KEYS + _VALUES
    recurrent: dict[str, tuple[int, ...]] = {
        "attn_qkv.weight": (convolved, WIDTH),
        "attn_gate.weight": (_VALUES, WIDTH),
        "ssm_conv1d.weight": (convolved, _CONVOLVED),
        "ssm_dt.bias": (_VALUE_HEADS,),
        "ssm_a": (_VALUE_HEADS,),
        "ssm_beta.weight": (_VALUE_HEADS, WIDTH),
        "ssm_alpha.weight": (_VALUE_HEADS, WIDTH),
        "ssm_norm.weight": (_STATE,),
        "ssm_out.weight": (WIDTH, _VALUES),
    }
    attention: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (2 * HEADS * HEAD, WIDTH),
        "attn_k.weight": (HEADS_KV * HEAD, WIDTH),
        "attn_v.weight": (HEADS_KV * HEAD, WIDTH),
        "attn_output.weight": (WIDTH, HEADS * HEAD),
        "attn_q_norm.weight": (HEAD,),
        "attn_k_norm.weight": (HEAD,),
    }
    every: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "post_attention_norm.weight": (WIDTH,),
        "ffn_gate.weight": (HIDDEN, WIDTH),
        "ffn_up.weight": (HIDDEN, WIDTH),
        "ffn_down.weight": (WIDTH, HIDDEN),
    }
    for layer in range(_LAYERS):
        own = attention if layer % _LAYERS == _LAYERS - 1 else recurrent
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (every | own).items()}
    return shapes


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and "conv" not in name and name != "token_embd.weight"


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    values = rng.standard_normal(shape)
    if "norm" in name:
        values = 1 + 0.2 * values
    elif name.endswith("ssm_a"):
        values = -np.abs(values) - 0.05
    elif _is_matrix(name, shape):
        values *= 1.5 * shape[-1] ** -0.5
    elif name != "token_embd.weight":
        values *= 0.3
    return values.astype(np.float32)
