"""A tiny target and a head for it: real files, and the head's forward pass in NumPy.

The layers of the target add little, so its next token depends mostly on the last one. The head is built, not
trained, to know as much: its attention finds the row's own token, and its output matrix is the target's. So
it is right about many tokens; what it makes of hidden states is random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.heads.eagle_file import FloatArray, HeadShape, write_head
from tests.heads.reference import ReferenceHead, random_weights
from tests.tiny import HEAD, N_EMBD, N_FF, N_HEAD, N_VOCAB, add_vocabulary, write_tiny

LAYERS = (1, 3, 5)
SHAPE = HeadShape(
    layers=LAYERS,
    target_width=N_EMBD,
    width=N_EMBD,
    heads=N_HEAD,
    heads_kv=N_HEAD,
    head=HEAD,
    hidden=N_FF,
    n_drafted=N_VOCAB - 36,
    norm_before_residual=True,
)


@dataclass(frozen=True)
class TinyPair:
    """A target, a head for it, and what the head computes.

    Attributes:
        drafted: (n_drafted,) the ids of the head's tokens.
    """

    target: Path
    head: Path
    reference: ReferenceHead
    drafted: NDArray[np.int64]


def write_pair(folder: Path, vocabulary_of: Path, name: str = "tiny") -> TinyPair:
    """The files of a tiny pair, in a folder; the target's is called by the name."""
    target = write_tiny(folder / f"{name}.gguf", "llama", vocabulary_of, damped=0.001)
    tensors = {t.name: np.array(t.data).astype(np.float32) for t in gguf.GGUFReader(target).tensors}
    rng = np.random.default_rng(4)
    drafted = np.sort(rng.permutation(N_VOCAB)[: SHAPE.n_drafted]).astype(np.int64)
    weights = random_weights(SHAPE.tensors, rng)
    own_token = np.concatenate([np.eye(N_EMBD), np.zeros((N_EMBD, N_EMBD))], axis=1).astype(np.float32)
    weights["blk.0.attn_norm.weight"][:] = 1
    weights["blk.0.attn_norm_2.weight"][:] = 0.1
    weights["blk.0.attn_q.weight"] = weights["blk.0.attn_k.weight"] = 2 * own_token
    weights["blk.0.attn_v.weight"] = own_token
    weights["blk.0.attn_output.weight"] = 4 * np.eye(N_EMBD, dtype=np.float32)
    weights["blk.0.ffn_down.weight"] *= 0.1
    weights["output_norm.weight"] = tensors["output_norm.weight"]
    weights["output.weight"] = tensors["output.weight"][drafted]
    head = tiny_head(folder / "head.gguf", vocabulary_of, weights, drafted)
    return TinyPair(target, head, ReferenceHead(SHAPE, weights, tensors["token_embd.weight"]), drafted)


def tiny_head(
    path: Path,
    vocabulary_of: Path,
    weights: dict[str, FloatArray] | None = None,
    drafted: NDArray[np.int64] | None = None,
    **changes: Any,
) -> Path:
    """A head, with random weights if none are given; some sizes may differ from those of the tiny target."""
    shape = replace(SHAPE, **changes)
    if weights is None:
        weights = random_weights(shape.tensors, np.random.default_rng(1))
    if drafted is None:
        drafted = np.arange(shape.n_drafted, dtype=np.int64)
    return write_head(
        path, shape, weights, lambda writer: add_vocabulary(writer, vocabulary_of), drafted=drafted
    )
