"""LoRA adapters with random weights, for tiny models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.tiny import N_EMBD, N_LAYER, finish


def write_adapter(path: Path, *, architecture: str = "llama", kind: str = "lora", seed: int = 0) -> Path:
    """An adapter of rank 4 for the queries of every layer of a tiny model."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", 8.0)
    rng = np.random.default_rng(seed)
    for layer in range(N_LAYER):
        for name, shape in (("lora_a", (4, N_EMBD)), ("lora_b", (N_EMBD, 4))):
            values = rng.standard_normal(shape).astype(np.float32) * np.float32(0.5)
            writer.add_tensor(f"blk.{layer}.attn_q.weight.{name}", values)
    finish(writer)
    return path
