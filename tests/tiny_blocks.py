"""Tiny targets with block heads, and what these compute.

The layers of the target add little, so its next token depends mostly on the last one. The heads are built,
not trained, to know as much: their attention carries the last token's embedding to the other positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.heads.block import BlockKind
from tests.heads.block_files import write_block_head
from tests.heads.block_reference import BlockShape, ReferenceBlockHead
from tests.heads.eagle_file import FloatArray
from tests.tiny import HEAD, N_EMBD, N_FF, N_HEAD, N_VOCAB, add_vocabulary, write_tiny
from tests.tiny_hybrids import HYBRIDS

_PLAIN = BlockShape(
    layers=(1, 3, 5),
    width=N_EMBD,
    n_layers=2,
    heads=N_HEAD,
    heads_kv=N_HEAD,
    head=HEAD,
    hidden=N_FF,
    n_vocab=N_VOCAB,
    block_size=8,
    mask=1,
)
SHAPES = {
    BlockKind.DFLASH: _PLAIN,
    BlockKind.DFLASH2: replace(_PLAIN, top_k=12, rank=16),
}


@dataclass(frozen=True)
class TinyBlocks:
    """A target, a block head for it, and what the head computes."""

    target: Path
    head: Path
    shape: BlockShape
    reference: ReferenceBlockHead


def write_blocks(
    folder: Path,
    vocabulary_of: Path,
    kind: BlockKind = BlockKind.DFLASH,
    architecture: str = "llama",
    *,
    every: int = 1,
) -> TinyBlocks:
    """The files of a tiny pair, in a folder.

    Args:
        architecture: of the target, one of tests.tiny or tests.tiny_hybrids.
        every: which tokens the head drafts: every second one with 2.
    """
    target = write_tiny(
        folder / f"{architecture}.gguf",
        architecture,
        vocabulary_of,
        kind=HYBRIDS.get(architecture),
        damped=0.001,
    )
    written = {t.name: np.array(t.data).astype(np.float32) for t in gguf.GGUFReader(target).tensors}
    embedding, output = (written[f"{name}.weight"] for name in ("token_embd", "output"))
    shape = SHAPES[kind]
    weights = built(shape, embedding, written["output_norm.weight"])
    drafted = None
    if every > 1:
        drafted = np.arange(0, N_VOCAB, every, dtype=np.int64)
        weights["output.weight"] = output[drafted]
    head = tiny_block_head(
        folder / f"{architecture}-{kind.value}{'' if drafted is None else every}.gguf",
        vocabulary_of,
        shape,
        weights,
        drafted=drafted,
        rope_sections=architecture.startswith("qwen35"),
    )
    return TinyBlocks(target, head, shape, ReferenceBlockHead(shape, weights, embedding, output))


def tiny_block_head(
    path: Path,
    vocabulary_of: Path,
    shape: BlockShape = _PLAIN,
    weights: dict[str, FloatArray] | None = None,
    *,
    drafted: NDArray[np.int64] | None = None,
    rope_sections: bool = False,
) -> Path:
    """A block head, with random weights if none are given."""
    if weights is None:
        weights = shape.random(np.random.default_rng(1))
    return write_block_head(
        path,
        shape,
        weights,
        lambda writer: add_vocabulary(writer, vocabulary_of),
        drafted=drafted,
        rope_sections=rope_sections,
    )


def built(shape: BlockShape, embedding: FloatArray, output_norm: FloatArray) -> dict[str, FloatArray]:
    """Weights of a head that knows what follows the last token."""
    weights = shape.random(np.random.default_rng(4))
    mask = embedding[shape.mask] / np.linalg.norm(embedding[shape.mask])
    weights["enc.output_norm.weight"] *= 0.01  # the text is seen, and hardly matters
    weights["output_norm.weight"] = output_norm
    for index in range(shape.n_layers):
        part = f"blk.{index}."
        weights[part + "attn_norm.weight"][:] = 1
        weights[part + "ffn_down.weight"] *= 0.01
        carries = (np.eye(N_EMBD) - np.outer(mask, mask)) if index == 0 else np.zeros((N_EMBD, N_EMBD))
        weights[part + "attn_v.weight"] = carries.astype(np.float32)
        weights[part + "attn_output.weight"] = 1000 * np.eye(N_EMBD, dtype=np.float32)
        for side in ("attn", "ffn") if shape.top_k else ():
            weights[f"{part}{side}_conv_base"][:] = 0
            weights[f"{part}{side}_conv_base"][:, 0] = 1
            weights[f"{part}{side}_conv_proj.weight"] *= 0.001
    if shape.top_k:
        weights["selector_hidden.weight"] *= 0.1
    return weights
