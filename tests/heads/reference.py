"""The arithmetic of draft heads in NumPy: what llama.cpp is expected to compute.

EAGLE-3 heads are written after the paper (Li et al. 2025, arXiv 2503.01840, section 3) and its published
checkpoints, layers for multi-token prediction after Qwen 3.5's. Neither makes an attempt to be fast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.heads.eagle_file import HeadShape, LayerShape

FloatArray = NDArray[np.float32]


class MTPShape(LayerShape):
    """The sizes of Qwen 3.5's layer for multi-token prediction."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, rows first, by their names in a GGUF file behind the layer's number."""
        query, key = self.heads * self.head, self.heads_kv * self.head
        return {
            "nextn.eh_proj.weight": (self.width, 2 * self.width),
            "nextn.enorm.weight": (self.width,),
            "nextn.hnorm.weight": (self.width,),
            "nextn.shared_head_norm.weight": (self.width,),
            "attn_norm.weight": (self.width,),
            "attn_q.weight": (2 * query, self.width),
            "attn_k.weight": (key, self.width),
            "attn_v.weight": (key, self.width),
            "attn_q_norm.weight": (self.head,),
            "attn_k_norm.weight": (self.head,),
            "attn_output.weight": (self.width, query),
            "post_attention_norm.weight": (self.width,),
            "ffn_gate.weight": (self.hidden, self.width),
            "ffn_up.weight": (self.hidden, self.width),
            "ffn_down.weight": (self.width, self.hidden),
        }


@dataclass(frozen=True)
class _Row:
    """A row on its way through a layer.

    Attributes:
        query: (heads, head).
        key, value: (heads_kv, head).
        residual: (width,) what attention is added to.
        gate: (heads * head,) by which it is multiplied first.
    """

    query: FloatArray
    key: FloatArray
    value: FloatArray
    residual: FloatArray
    gate: FloatArray | float = 1.0


class ReferenceLayer:
    """A layer that reads a token beside the feature of the token before it, with given weights.

    Args:
        weights: by their names in the layer, without ".weight".
        embedding: (n_vocab, width) of tokens.
    """

    def __init__(self, shape: LayerShape, weights: Mapping[str, FloatArray], embedding: FloatArray) -> None:
        self._attention, self._weights, self._embedding = shape, weights, embedding

    def tree(
        self, tokens: Sequence[int], parents: Sequence[int], features: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """A whole tree of rows, each of a token and the feature of the token before it.

        Args:
            tokens: of the rows; those of a text come first, as a chain.
            parents: the row before each; -1 for the first.
            features: (known, width) of the first rows. Those of later rows are what their parents compute.

        Returns:
            The logits (rows, tokens that it drafts), and the features (rows, width) that rows compute.
        """
        shape = self._attention
        inputs = np.zeros((len(tokens), shape.width), dtype=np.float32)
        inputs[: len(features)] = features
        depths = np.zeros(len(tokens), dtype=np.int64)
        sees = np.eye(len(tokens), dtype=bool)
        logits: list[FloatArray] = []
        outputs: list[FloatArray] = []
        keys = np.zeros((len(tokens), shape.heads_kv, shape.head), dtype=np.float32)
        values = np.zeros_like(keys)
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent >= 0:
                depths[row] = depths[parent] + 1
                sees[row] |= sees[parent]
                if row >= len(features):
                    inputs[row] = outputs[parent]
            projected = self._row(token, inputs[row], int(depths[row]))
            keys[row], values[row] = projected.key, projected.value
            attended = self._attended(projected.query, keys[sees[row]], values[sees[row]])
            between = self._weights["attn_output"] @ (attended * projected.gate) + projected.residual
            outputs.append(self._feature(between))
            logits.append(self._logits(outputs[-1]))
        return np.array(logits, dtype=np.float32), np.array(outputs, dtype=np.float32)

    @abstractmethod
    def _row(self, token: int, feature: FloatArray, position: int) -> _Row:
        """The projections of a row."""

    @abstractmethod
    def _feature(self, between: FloatArray) -> FloatArray:
        """The feature that a row computes of what is between attention and feed-forward block."""

    @abstractmethod
    def _logits(self, feature: FloatArray) -> FloatArray:
        """The logits of the feature that a row computes."""

    def _attended(self, query: FloatArray, keys: FloatArray, values: FloatArray) -> FloatArray:
        """(heads * head,) what a row takes from those that it sees."""
        groups = self._attention.heads // self._attention.heads_kv
        keys, values = np.repeat(keys, groups, axis=1), np.repeat(values, groups, axis=1)
        scores = np.einsum("hd,rhd->hr", query, keys) * self._attention.head**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        found: FloatArray = np.einsum("hr,rhd->hd", weights, values).ravel().astype(np.float32)
        return found

    def _angles(self, position: int) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines of rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""
        half = self._attention.head // 2
        angles = position * self._attention.rope_base ** (-np.arange(half) / half)
        return np.cos(angles), np.sin(angles)

    def _normed(self, x: FloatArray, name: str) -> FloatArray:
        """Root mean square normalization of the last axis."""
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self._attention.epsilon)
        normed: FloatArray = x / scale * self._weights[name]
        return normed

    def _fed_forward(self, normed: FloatArray) -> FloatArray:
        """(width,) what the feed-forward block adds."""
        weights = self._weights
        found: FloatArray = weights["ffn_down"] @ (
            silu(weights["ffn_gate"] @ normed) * (weights["ffn_up"] @ normed)
        )
        return found


def silu(x: FloatArray) -> FloatArray:
    """The usual activation of gates."""
    found: FloatArray = x / (1 + np.exp(-x))
    return found


class ReferenceHead(ReferenceLayer):
    """A head with given weights, and the token embedding that it uses, (n_vocab, width)."""

    def __init__(self, shape: HeadShape, weights: Mapping[str, FloatArray], embedding: FloatArray) -> None:
        named = {name.removeprefix("blk.0.").removesuffix(".weight"): w for name, w in weights.items()}
        super().__init__(shape, named, embedding)
        self._shape = shape

    def encode(self, hidden: FloatArray) -> FloatArray:
        """(tokens, width) the features of hidden states (tokens, layers * target_width)."""
        features: FloatArray = hidden @ self._weights["fc"].T
        return features

    def _row(self, token: int, feature: FloatArray, position: int) -> _Row:
        normed = self._normed(feature, "attn_norm_2")
        both = np.concatenate([self._normed(self._embedding[token], "attn_norm"), normed])
        query, key, value = (
            (self._weights[name] @ both).reshape(-1, self._shape.head)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        residual = normed if self._shape.norm_before_residual else feature
        return _Row(self._rotated(query, position), self._rotated(key, position), value, residual)

    def _rotated(self, heads: FloatArray, position: int) -> FloatArray:
        """Rotated pairs of neighbours."""
        cos, sin = self._angles(position)
        even, odd = heads[:, 0::2], heads[:, 1::2]
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        return turned.reshape(heads.shape).astype(np.float32)

    def _feature(self, between: FloatArray) -> FloatArray:
        found: FloatArray = between + self._fed_forward(self._normed(between, "ffn_norm"))
        return found

    def _logits(self, feature: FloatArray) -> FloatArray:
        found: FloatArray = self._weights["output"] @ self._normed(feature, "output_norm")
        return found


class ReferenceMTPLayer(ReferenceLayer):
    """Qwen 3.5's layer for multi-token prediction.

    Args:
        weights: by their names in a GGUF file behind the layer's number.
        embedding, output: (n_vocab, width) of the model.
    """

    def __init__(
        self, shape: MTPShape, weights: Mapping[str, FloatArray], embedding: FloatArray, output: FloatArray
    ) -> None:
        super().__init__(shape, {name.removesuffix(".weight"): w for name, w in weights.items()}, embedding)
        self._shape, self._output = shape, output

    def _row(self, token: int, feature: FloatArray, position: int) -> _Row:
        both = [self._normed(self._embedding[token], "nextn.enorm"), self._normed(feature, "nextn.hnorm")]
        joined = self._weights["nextn.eh_proj"] @ np.concatenate(both)
        normed = self._normed(joined, "attn_norm")
        queries = (self._weights["attn_q"] @ normed).reshape(-1, 2, self._shape.head)
        key, value = (
            (self._weights[name] @ normed).reshape(-1, self._shape.head) for name in ("attn_k", "attn_v")
        )
        return _Row(
            self._rotated(self._normed(queries[:, 0], "attn_q_norm"), position),
            self._rotated(self._normed(key, "attn_k_norm"), position),
            value,
            joined,
            1 / (1 + np.exp(-queries[:, 1].ravel())),
        )

    def _rotated(self, heads: FloatArray, position: int) -> FloatArray:
        """Rotated pairs of an element in the first half and one in the second."""
        cos, sin = self._angles(position)
        first, second = np.split(heads, 2, axis=1)
        turned = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=1)
        return turned.astype(np.float32)

    def _feature(self, between: FloatArray) -> FloatArray:
        after = between + self._fed_forward(self._normed(between, "post_attention_norm"))
        return self._normed(after, "nextn.shared_head_norm")

    def _logits(self, feature: FloatArray) -> FloatArray:
        found: FloatArray = self._output @ feature
        return found


def random_weights(tensors: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, FloatArray]:
    """Random weights of these shapes, of about the size that keeps activations near one."""
    return {
        name: (
            np.abs(1 + 0.1 * rng.standard_normal(shape))
            if len(shape) == 1
            else rng.standard_normal(shape) * shape[-1] ** -0.5
        ).astype(np.float32)
        for name, shape in tensors.items()
    }
