"""A tiny recurrent model with random weights: a real file, for what needs no sense."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.tiny import add_vocabulary_of, finish

EMBEDDING, INNER, STATE, RANK, CONV, LAYERS = 32, 64, 16, 4, 4, 2


def write_mamba(path: Path, vocabulary_of: Path) -> Path:
    """A Mamba with another model's vocabulary; returns its path."""
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    n_vocab = add_vocabulary_of(writer, vocabulary_of)
    rng = np.random.default_rng(1)

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", n_vocab, EMBEDDING, scale=1.0)
    add("output_norm.weight", EMBEDDING, scale=1.0)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", EMBEDDING, scale=1.0)
        add(f"blk.{i}.ssm_in.weight", 2 * INNER, EMBEDDING)
        add(f"blk.{i}.ssm_conv1d.weight", INNER, CONV)
        add(f"blk.{i}.ssm_conv1d.bias", INNER)
        add(f"blk.{i}.ssm_x.weight", RANK + 2 * STATE, INNER)
        add(f"blk.{i}.ssm_dt.weight", INNER, RANK)
        add(f"blk.{i}.ssm_dt.bias", INNER)
        writer.add_tensor(f"blk.{i}.ssm_a", -np.abs(rng.standard_normal((INNER, STATE))).astype(np.float32))
        add(f"blk.{i}.ssm_d", INNER)
        add(f"blk.{i}.ssm_out.weight", EMBEDDING, INNER)
    finish(writer)
    return path
