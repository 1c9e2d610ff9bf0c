"""Writing a tiny target with random weights, whose vocabulary is of bytes; and sizes of a head for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from tests import tiny_hybrid
from tests.heads.eagle_file import FloatArray, HeadShape
from tests.heads.reference import MTPShape
from tests.tiny import finish
from tests.tiny_hybrid import N_VOCAB, add_bytes

WIDTH, N_LAYERS = 64, 4
SHAPE = HeadShape(
    layers=(1, 2, 3), target_width=WIDTH, width=WIDTH, heads=4, heads_kv=2, head=16, hidden=96, n_drafted=100
)
MTP_SHAPE = MTPShape(
    width=tiny_hybrid.WIDTH,
    heads=tiny_hybrid.HEADS,
    heads_kv=tiny_hybrid.HEADS_KV,
    head=tiny_hybrid.HEAD,
    hidden=tiny_hybrid.HIDDEN,
)
"""Sizes of a layer for multi-token prediction of `tiny_hybrid.write_tiny_hybrid`."""


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
    finish(writer)
    return path


def blank_target(path: Path) -> ModelFiles:
    """Write a target whose tokens have no embedding: for tests of headers."""
    embedding = np.zeros((N_VOCAB, WIDTH), dtype=np.float32)
    return ModelFiles.of(read_header(write_target(path, embedding, np.random.default_rng(1))))


def without_tensor(name: str) -> Callable[[GGUFHeader], GGUFHeader]:
    """A change that takes a tensor out of a header."""
    return lambda header: replace(header, tensors=tuple(t for t in header.tensors if t.name != name))
