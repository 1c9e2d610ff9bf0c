"""A tiny RWKV 6 with random weights: a model that reads a matrix in another shape than it is stored in."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.tiny import add_vocabulary_of, finish

EMBEDDING, HEAD, HIDDEN, RANK, LAYERS = 128, 64, 192, 32, 4  # ggml computes heads of 64


def write_rwkv(path: Path, vocabulary_of: Path) -> Path:
    """An RWKV 6 with another model's vocabulary; returns its path."""
    writer = gguf.GGUFWriter(path, "rwkv6")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(0)
    writer.add_layer_norm_eps(1e-5)
    writer.add_wkv_head_size(HEAD)
    writer.add_time_mix_extra_dim(RANK)
    writer.add_time_decay_extra_dim(RANK)
    writer.add_rescale_every_n_layers(0)
    writer.add_token_shift_count(2)
    n_vocab = add_vocabulary_of(writer, vocabulary_of)
    rng = np.random.default_rng(1)

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    def add_matrix(name: str, *shape: int) -> None:
        values = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        q8_0 = gguf.GGMLQuantizationType.Q8_0  # some of them are too small to be streamed then
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", EMBEDDING, scale=1.0)
        add(f"{name}.bias", EMBEDDING)

    add("token_embd.weight", n_vocab, EMBEDDING, scale=1.0)
    add_norm("token_embd_norm")
    add_norm("output_norm")
    add("output.weight", n_vocab, EMBEDDING)
    for i in range(LAYERS):
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            add_norm(f"blk.{i}.{name}")
        add_matrix(f"blk.{i}.time_mix_w1", 5 * RANK, EMBEDDING)
        add(f"blk.{i}.time_mix_w2.weight", 5, EMBEDDING, RANK)  # read as if the five had another dimension
        add(f"blk.{i}.time_mix_lerp_x.weight", 1, 1, EMBEDDING)
        add(f"blk.{i}.time_mix_lerp_fused.weight", 5, 1, 1, EMBEDDING)
        add(f"blk.{i}.time_mix_first.weight", EMBEDDING // HEAD, HEAD)
        add(f"blk.{i}.time_mix_decay.weight", EMBEDDING)
        add_matrix(f"blk.{i}.time_mix_decay_w1", RANK, EMBEDDING)
        add_matrix(f"blk.{i}.time_mix_decay_w2", EMBEDDING, RANK)
        for name in ("key", "value", "receptance", "gate", "output"):
            add_matrix(f"blk.{i}.time_mix_{name}", EMBEDDING, EMBEDDING)
        for name in "kr":
            add(f"blk.{i}.channel_mix_lerp_{name}.weight", 1, 1, EMBEDDING)
        add_matrix(f"blk.{i}.channel_mix_key", HIDDEN, EMBEDDING)
        add_matrix(f"blk.{i}.channel_mix_value", EMBEDDING, HIDDEN)
        add_matrix(f"blk.{i}.channel_mix_receptance", EMBEDDING, EMBEDDING)
    finish(writer)
    return path
