"""The arithmetic of block heads in NumPy: what llama.cpp is expected to compute.

Written after the published checkpoints of DFlash and DFlash2, and not made to be fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.heads.eagle_file import FloatArray, LayerShape
from tests.heads.reference import random_weights, silu


@dataclass(frozen=True, kw_only=True)
class BlockShape(LayerShape):
    """The sizes of a block head.

    Attributes:
        layers: of the target, whose inputs it reads.
        n_layers: its own layers.
        n_vocab: tokens that it drafts.
        block_size: positions of a block, the last token's included.
        mask: the token at the others.
        rank: of the selector's matrices.
        top_k: candidates of each position whose pairs are scored (DFlash2); 0 for none.
        kernel, group: taps of its convolutions, and elements that share their coefficients (DFlash2).
        causal: whether a position sees only those before it.
    """

    layers: tuple[int, ...]
    n_layers: int
    n_vocab: int
    block_size: int
    mask: int
    rank: int = 8
    top_k: int = 0
    kernel: int = 3
    group: int = 16
    causal: bool = False

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, rows first, by their names in a GGUF file."""
        query, key = self.heads * self.head, self.heads_kv * self.head
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (self.width, len(self.layers) * self.width),
            "enc.output_norm.weight": (self.width,),
            "output_norm.weight": (self.width,),
        }
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (self.width,),
            "attn_q.weight": (query, self.width),
            "attn_k.weight": (key, self.width),
            "attn_v.weight": (key, self.width),
            "attn_output.weight": (self.width, query),
            "attn_q_norm.weight": (self.head,),
            "attn_k_norm.weight": (self.head,),
            "ffn_norm.weight": (self.width,),
            "ffn_gate.weight": (self.hidden, self.width),
            "ffn_up.weight": (self.hidden, self.width),
            "ffn_down.weight": (self.width, self.hidden),
        }
        if self.top_k:
            for part in ("attn", "ffn"):
                layer[f"{part}_conv_base"] = (2, self.kernel, self.width)
                projected = 2 * self.kernel * self.width // self.group
                layer[f"{part}_conv_proj.weight"] = (projected, self.width)
            found["selector_predecessor.weight"] = found["selector_successor.weight"] = (
                self.n_vocab,
                self.rank,
            )
            found["selector_hidden.weight"] = (self.rank, self.width)
        for index in range(self.n_layers):
            found |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
        return found

    def random(self, rng: np.random.Generator) -> dict[str, FloatArray]:
        """Random weights; see `random_weights`."""
        return random_weights(self.tensors, rng)


class ReferenceBlockHead:
    """A block head with given weights.

    Args:
        weights: by their names in a GGUF file.
        embedding, output: (n_vocab, width) the target's.
    """

    def __init__(
        self, shape: BlockShape, weights: Mapping[str, FloatArray], embedding: FloatArray, output: FloatArray
    ) -> None:
        self._shape = shape
        self._weights = {name.removesuffix(".weight"): values for name, values in weights.items()}
        self._embedding, self._output = embedding, output

    def block(self, hidden: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """(positions, n_vocab) the logits of a block, without what depends on the tokens before.

        Args:
            hidden: (text, layers * width) the target's hidden states of the text before the block.
            tokens: the last token, and masks.
        """
        found: FloatArray = self._states(hidden, tokens) @ self._output.T
        return found

    def pairs(self, hidden: FloatArray, tokens: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """The candidates (positions, top_k) of each position but the first, and how well they follow.

        Returns:
            The candidates' tokens, and scores (positions, top_k, top_k): of each candidate of the position
            before, those of this position's.
        """
        states = self._states(hidden, tokens)
        logits = states @ self._output.T
        candidates = np.argsort(-logits, axis=1)[:, : self._shape.top_k]
        gates = states @ self._weights["selector_hidden"].T
        scores = np.zeros((len(tokens), self._shape.top_k, self._shape.top_k), dtype=np.float32)
        for row in range(1, len(tokens)):
            before = candidates[row - 1] if row > 1 else np.repeat(tokens[0], self._shape.top_k)
            known = self._weights["selector_predecessor"][before] * gates[row]
            follow = known @ self._weights["selector_successor"][candidates[row]].T
            scores[row] = follow + logits[row, candidates[row]]
        return candidates[1:].astype(np.float32), scores[1:]

    def _states(self, hidden: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """(positions, width) the last states of a block."""
        text = self._normed(hidden @ self._weights["fc"].T, "enc.output_norm")
        x = self._embedding[list(tokens)]
        for index in range(self._shape.n_layers):
            normed = self._normed(x, f"blk.{index}.attn_norm")
            mixed = self._mixed(f"blk.{index}.attn", normed)
            x = x + mixed.after(self._attended(index, text, mixed.before(normed)))
            normed = self._normed(x, f"blk.{index}.ffn_norm")
            mixed = self._mixed(f"blk.{index}.ffn", normed)
            x = x + mixed.after(self._fed_forward(index, mixed.before(normed)))
        return self._normed(x, "output_norm")

    def _attended(self, index: int, text: FloatArray, normed: FloatArray) -> FloatArray:
        shape, part = self._shape, f"blk.{index}.attn_"
        rows, positions = np.concatenate([text, normed]), np.arange(len(text) + len(normed))
        query = self._projected(part + "q", normed, positions[len(text) :])
        key = self._projected(part + "k", rows, positions)
        value = (rows @ self._weights[part + "v"].T).reshape(len(rows), -1, shape.head)
        groups = shape.heads // shape.heads_kv
        key, value = np.repeat(key, groups, axis=1), np.repeat(value, groups, axis=1)
        scores = np.einsum("qhd,khd->qhk", query, key) * shape.head**-0.5
        if shape.causal:
            scores[np.broadcast_to(positions > positions[len(text) :, None, None], scores.shape)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        found = np.einsum("qhk,khd->qhd", weights, value).reshape(len(normed), -1)
        attended: FloatArray = found @ self._weights[part + "output"].T
        return attended

    def _projected(self, name: str, rows: FloatArray, positions: NDArray[np.integer]) -> FloatArray:
        """(rows, heads, head) normalized and rotated, an element of the first half with one of the second."""
        half = self._shape.head // 2
        projected = (rows @ self._weights[name].T).reshape(len(rows), -1, self._shape.head)
        first, second = np.split(self._normed(projected, name + "_norm"), 2, axis=2)
        angles = positions[:, None] * self._shape.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=2)

    def _fed_forward(self, index: int, normed: FloatArray) -> FloatArray:
        gate, up, down = (self._weights[f"blk.{index}.ffn_{name}"] for name in ("gate", "up", "down"))
        found: FloatArray = (silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return found

    def _normed(self, x: FloatArray, name: str) -> FloatArray:
        """Root mean square normalization of the last axis."""
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self._shape.epsilon)
        normed: FloatArray = x / scale * self._weights[name]
        return normed

    def _mixed(self, part: str, normed: FloatArray) -> _Mixing:
        """The convolutions around a part of a layer; they do nothing in other heads than DFlash2."""
        shape = self._shape
        if not shape.top_k:
            return _Mixing(None)
        projected = normed @ self._weights[part + "_conv_proj"].T
        coefficients = projected.reshape(len(normed), 2, shape.kernel, -1).repeat(shape.group, axis=3)
        return _Mixing(coefficients + self._weights[part + "_conv_base"])


@dataclass(frozen=True)
class _Mixing:
    """Convolutions over the positions of a block, before and after a part of a layer.

    Attributes:
        taps: (positions, 2, kernel, width) factors of the position itself and of those before it.
    """

    taps: FloatArray | None

    def before(self, x: FloatArray) -> FloatArray:
        """(positions, width) what the part reads."""
        return self._over(x, 0)

    def after(self, x: FloatArray) -> FloatArray:
        """(positions, width) what the part adds."""
        return self._over(x, 1)

    def _over(self, x: FloatArray, side: int) -> FloatArray:
        if self.taps is None:
            return x
        found = np.zeros_like(x)
        for tap in range(min(self.taps.shape[2], len(x))):
            found[tap:] += self.taps[tap:, side, tap] * x[: len(x) - tap]
        return found
