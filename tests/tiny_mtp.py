"""Tiny hybrids with a layer for multi-token prediction, and what that layer computes.

The model's layers add little, so its next token depends mostly on the last one. The layer for further tokens
is built, not trained, to know as much: it passes the token's own embedding on to the model's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.heads.eagle_file import FloatArray
from tests.heads.reference import MTPShape, ReferenceMTPLayer, random_weights, silu
from tests.tiny import GATED_MIXTURE, HEAD, N_EMBD, N_EXPERT_USED, N_FF, N_HEAD, N_HEAD_KV, write_tiny
from tests.tiny_hybrids import HYBRIDS

SHAPE = MTPShape(width=N_EMBD, heads=N_HEAD, heads_kv=N_HEAD_KV, head=HEAD, hidden=N_FF)


@dataclass(frozen=True)
class TinyMTP:
    """A model with a layer for multi-token prediction, and what the layer computes."""

    path: Path
    reference: ReferenceMTPLayer


class _ReferenceMixture(ReferenceMTPLayer):
    """A layer whose feed-forward block is a mixture of experts, with one that all tokens share."""

    def _fed_forward(self, normed: FloatArray) -> FloatArray:
        weights = self._weights
        scores = weights["ffn_gate_inp"] @ normed
        chosen = np.argsort(scores)[-N_EXPERT_USED:]
        shares = np.exp(scores[chosen] - scores[chosen].max())
        shares /= shares.sum()
        found = np.zeros(N_EMBD, dtype=np.float32)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up, down = (weights[f"ffn_{name}_exps"][expert] for name in ("gate", "up", "down"))
            found += share * (down @ (silu(gate @ normed) * (up @ normed)))
        gate, up, down = (weights[f"ffn_{name}_shexp"] for name in ("gate", "up", "down"))
        share = 1 / (1 + np.exp(-(weights["ffn_gate_inp_shexp"] @ normed)))
        shared: FloatArray = found + share * (down @ (silu(gate @ normed) * (up @ normed)))
        return shared


def write_mtp(
    path: Path,
    architecture: str,
    vocabulary_of: Path,
    *,
    damped: float = 0.001,
    clever: bool = True,
    n_layers: int = 1,
    alone: bool = False,
) -> TinyMTP:
    """Write a "qwen35" or a "qwen35moe".

    Args:
        damped: as for `write_tiny`.
        clever: if False, the layer for further tokens has random weights.
        n_layers: how many there are for further tokens.
        alone: leave out the model's own layers.
    """
    kind = HYBRIDS[architecture]
    plain = write_tiny(path, architecture, vocabulary_of, kind=kind, damped=damped)
    written = {t.name: np.array(t.data).astype(np.float32) for t in gguf.GGUFReader(plain).tensors}
    weights = _weights(architecture, written["output_norm.weight"], clever=clever)
    write_tiny(
        path,
        architecture,
        vocabulary_of,
        kind=kind,
        damped=damped,
        mtp=weights,
        n_mtp=n_layers,
        alone=alone,
    )
    reference = _ReferenceMixture if architecture == "qwen35moe" else ReferenceMTPLayer
    rounded = {
        name: w if w.ndim == 1 or "gate_inp" in name else w.astype(np.float16).astype(np.float32)
        for name, w in weights.items()
    }
    return TinyMTP(path, reference(SHAPE, rounded, written["token_embd.weight"], written["output.weight"]))


def _weights(architecture: str, output_norm: FloatArray, *, clever: bool) -> Mapping[str, FloatArray]:
    rng = np.random.default_rng(4)
    shapes = dict(SHAPE.tensors)
    if architecture == "qwen35moe":
        shapes = {
            name: shape for name, shape in shapes.items() if not name.startswith("ffn_")
        } | GATED_MIXTURE
    weights = random_weights(shapes, rng)
    if clever:
        joined = weights["nextn.eh_proj.weight"]
        joined[:, :N_EMBD] = np.eye(N_EMBD)
        joined[:, N_EMBD:] *= 0.05
        weights["nextn.enorm.weight"][:] = 1
        weights["nextn.shared_head_norm.weight"] = output_norm
        for name in weights:
            if "ffn_down" in name or "attn_output" in name:
                weights[name] *= 0.05
    return weights
