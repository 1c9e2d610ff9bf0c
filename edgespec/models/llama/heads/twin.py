"""The arithmetic of an EAGLE-3 head in NumPy: what llama.cpp is expected to compute.

It is written after the paper (Li et al. 2025, arXiv 2503.01840, section 3) and its published checkpoints, and
makes no attempt to be fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head.

    Attributes:
        layers: of the target, whose inputs it reads.
        target_width, width: elements of the target's hidden states, and of the head's features.
        heads, heads_kv, head: attention heads of queries, those of keys and values, and elements of each.
        hidden: elements between the matrices of its feed-forward block.
        n_drafted: tokens that it drafts.
        norm_before_residual: whether features are normalized before they are added, too.
    """

    layers: tuple[int, ...]
    target_width: int
    width: int
    heads: int
    heads_kv: int
    head: int
    hidden: int
    n_drafted: int
    n_context: int = 2048
    rope_base: float = 10000.0
    epsilon: float = 1e-5
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

    def random(self, rng: np.random.Generator) -> dict[str, FloatArray]:
        """Random weights of about the size that keeps activations near one."""
        return {
            name: (
                np.abs(1 + 0.1 * rng.standard_normal(shape))
                if len(shape) == 1
                else rng.standard_normal(shape) * shape[-1] ** -0.5
            ).astype(np.float32)
            for name, shape in self.tensors.items()
        }


class HeadTwin:
    """A head with given weights, and the token embedding that it uses, (n_vocab, width)."""

    def __init__(self, shape: HeadShape, weights: Mapping[str, FloatArray], embedding: FloatArray) -> None:
        self._shape = shape
        self._weights = {
            name.removeprefix("blk.0.").removesuffix(".weight"): w for name, w in weights.items()
        }
        self._embedding = embedding

    def encode(self, hidden: FloatArray) -> FloatArray:
        """(tokens, width) the features of hidden states (tokens, layers * target_width)."""
        features: FloatArray = hidden @ self._weights["fc"].T
        return features

    def tree(
        self, tokens: Sequence[int], parents: Sequence[int], features: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """A whole tree of rows, each of a token and the feature of the token before it.

        Args:
            tokens: of the rows; those of a text come first, as a chain.
            parents: the row before each; -1 for the first.
            features: (known, width) of the first rows. Those of later rows are what their parents compute.

        Returns:
            The logits (rows, n_drafted), and the features (rows, width) that rows compute.
        """
        inputs = np.zeros((len(tokens), self._shape.width), dtype=np.float32)
        inputs[: len(features)] = features
        depths = np.zeros(len(tokens), dtype=np.int64)
        sees = np.eye(len(tokens), dtype=bool)
        logits: list[FloatArray] = []
        outputs: list[FloatArray] = []
        keys = np.zeros((len(tokens), self._shape.heads_kv, self._shape.head), dtype=np.float32)
        values = np.zeros_like(keys)
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent >= 0:
                depths[row] = depths[parent] + 1
                sees[row] |= sees[parent]
                if row >= len(features):
                    inputs[row] = outputs[parent]
            query, keys[row], values[row] = self._projected(token, inputs[row], int(depths[row]))
            attended = self._attended(query, keys[sees[row]], values[sees[row]])
            outputs.append(self._feature(attended, inputs[row]))
            logits.append(self._normed(outputs[-1], "output_norm") @ self._weights["output"].T)
        return np.array(logits, dtype=np.float32), np.array(outputs, dtype=np.float32)

    def _projected(self, token: int, feature: FloatArray, position: int) -> tuple[FloatArray, ...]:
        """The query (heads, head), key and value (heads_kv, head) of a row."""
        both = np.concatenate(
            [self._normed(self._embedding[token], "attn_norm"), self._normed(feature, "attn_norm_2")]
        )
        query, key, value = (
            (self._weights[name] @ both).reshape(-1, self._shape.head)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        return self._rotated(query, position), self._rotated(key, position), value

    def _rotated(self, heads: FloatArray, position: int) -> FloatArray:
        """Rotary position embedding of neighbouring pairs (Su et al. 2021, arXiv 2104.09864)."""
        half = self._shape.head // 2
        angles = position * self._shape.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        even, odd = heads[:, 0::2], heads[:, 1::2]
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        return turned.reshape(heads.shape).astype(np.float32)

    def _attended(self, query: FloatArray, keys: FloatArray, values: FloatArray) -> FloatArray:
        """(heads * head,) what a row takes from those that it sees."""
        groups = self._shape.heads // self._shape.heads_kv
        keys, values = np.repeat(keys, groups, axis=1), np.repeat(values, groups, axis=1)
        scores = np.einsum("hd,rhd->hr", query, keys) * self._shape.head**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        found: FloatArray = np.einsum("hr,rhd->hd", weights, values).ravel().astype(np.float32)
        return found

    def _feature(self, attended: FloatArray, feature: FloatArray) -> FloatArray:
        """The feature that a row computes: after the residuals of attention and of the feed-forward block."""
        weights = self._weights
        if self._shape.norm_before_residual:
            feature = self._normed(feature, "attn_norm_2")
        between = weights["attn_output"] @ attended + feature
        normed = self._normed(between, "ffn_norm")
        gate = weights["ffn_gate"] @ normed
        hidden = gate / (1 + np.exp(-gate)) * (weights["ffn_up"] @ normed)
        found: FloatArray = between + weights["ffn_down"] @ hidden
        return found

    def _normed(self, x: FloatArray, name: str) -> FloatArray:
        """Root mean square normalization."""
        normed: FloatArray = x / np.sqrt(np.mean(np.square(x)) + self._shape.epsilon) * self._weights[name]
        return normed
