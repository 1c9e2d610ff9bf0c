"""The arithmetic of a Gemma 4 and of its assistant in NumPy: what llama.cpp is expected to compute.

Written after Gemma 4's published description (dense layers, without embeddings for each layer), and after the
description of its assistant: layers without keys and values of their own, whose queries look at those of the
target's last layers. Neither makes an attempt to be fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.heads.eagle_file import FloatArray, LayerShape

Weights = Mapping[str, FloatArray]


@dataclass(frozen=True, kw_only=True)
class GemmaShape(LayerShape):
    """The sizes of a Gemma 4 or of an assistant.

    Attributes:
        head, sliding_head: elements of a head in a layer that sees everything, and in one with a window.
        sliding: for each layer, whether it has a window.
        window: tokens that such a layer sees, the row's own included.
        target_width: elements of the target's states, for an assistant; 0 for a model.
    """

    sliding_head: int
    sliding: tuple[bool, ...]
    window: int
    n_vocab: int
    target_width: int = 0
    n_context: int = 4096
    rope_base: float = 1e6
    sliding_rope_base: float = 1e4
    epsilon: float = 1e-6

    def head_of(self, layer: int) -> int:
        """Elements of a head in a layer."""
        return self.sliding_head if self.sliding[layer] else self.head

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, rows first, by their names in a GGUF file."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.n_vocab, self.width),
            "output_norm.weight": (self.width,),
            "rope_freqs.weight": (self.head // 2,),
        }
        if self.target_width:
            shapes["nextn.pre_projection.weight"] = (self.width, 2 * self.target_width)
            shapes["nextn.post_projection.weight"] = (self.target_width, self.width)
        else:
            shapes["output.weight"] = (self.n_vocab, self.width)
        for layer in range(len(self.sliding)):
            head = self.head_of(layer)
            own: dict[str, tuple[int, ...]] = {
                "attn_norm.weight": (self.width,),
                "attn_q.weight": (self.heads * head, self.width),
                "attn_q_norm.weight": (head,),
                "attn_output.weight": (self.width, self.heads * head),
                "post_attention_norm.weight": (self.width,),
                "ffn_norm.weight": (self.width,),
                "ffn_gate.weight": (self.hidden, self.width),
                "ffn_up.weight": (self.hidden, self.width),
                "ffn_down.weight": (self.width, self.hidden),
                "post_ffw_norm.weight": (self.width,),
                "layer_output_scale.weight": (1,),
            }
            if not self.target_width:
                own |= {
                    "attn_k.weight": (self.heads_kv * head, self.width),
                    "attn_v.weight": (self.heads_kv * head, self.width),
                    "attn_k_norm.weight": (head,),
                }
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
        return shapes

    def random(self, rng: np.random.Generator, damped: float = 1.0) -> dict[str, FloatArray]:
        """Random weights of about the size that keeps activations near one.

        Args:
            damped: scales what layers add; near 0, the next token depends on the last one alone.
        """
        weights: dict[str, FloatArray] = {}
        for name, shape in self.tensors.items():
            if name.startswith("rope_freqs"):
                # A quarter of each head is rotated.
                values = np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30)
            elif name.endswith("layer_output_scale.weight"):
                values = np.full(shape, 0.9)
            elif len(shape) == 1:
                # Scores are not scaled, so queries and keys are kept small.
                scale = 0.5 if name.endswith(("_q_norm.weight", "_k_norm.weight")) else 1.0
                scale *= damped if ".post_" in name else 1.0
                values = np.abs(1 + 0.1 * rng.standard_normal(shape)) * scale
            else:
                values = rng.standard_normal(shape) * shape[-1] ** -0.5
            weights[name] = values.astype(np.float32)
        return weights


@dataclass(frozen=True)
class ReadTokens:
    """A text as a target has read it.

    Attributes:
        states: (tokens, width) the last states, after the last normalization.
        keys, values: of each layer, (tokens, heads_kv, head).
    """

    states: FloatArray
    keys: tuple[FloatArray, ...]
    values: tuple[FloatArray, ...]

    def first(self, n: int) -> ReadTokens:
        """The first tokens alone: nothing of them depends on what follows."""
        keys, values = (tuple(rows[:n] for rows in layers) for layers in (self.keys, self.values))
        return ReadTokens(self.states[:n], keys, values)


class _Layers:
    """The parts that a model and its assistant share."""

    def __init__(self, shape: GemmaShape, weights: Weights) -> None:
        self.shape, self.weights = shape, weights

    def _of(self, layer: int, name: str) -> FloatArray:
        return self.weights[f"blk.{layer}.{name}.weight"]

    def _normed(self, x: FloatArray, weight: FloatArray | float = 1.0) -> FloatArray:
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self.shape.epsilon)
        normed: FloatArray = (x / scale * weight).astype(np.float32)
        return normed

    def _rotated(self, heads: FloatArray, positions: Sequence[int], layer: int) -> FloatArray:
        """(rows, heads, head) with each element of the first half turned with one of the second."""
        half = heads.shape[-1] // 2
        sliding = self.shape.sliding[layer]
        base = self.shape.sliding_rope_base if sliding else self.shape.rope_base
        slower = 1.0 if sliding else self.weights["rope_freqs.weight"]
        angles = np.outer(positions, base ** (-np.arange(half) / half) / slower)[:, None, :]
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        turned = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return turned.astype(np.float32)

    def _queries(self, layer: int, normed: FloatArray, positions: Sequence[int]) -> FloatArray:
        head = self.shape.head_of(layer)
        query = (normed @ self._of(layer, "attn_q").T).reshape(len(normed), self.shape.heads, head)
        return self._rotated(self._normed(query, self._of(layer, "attn_q_norm")), positions, layer)

    def _attended(
        self, layer: int, query: FloatArray, keys: FloatArray, values: FloatArray, row: int, last: int
    ) -> FloatArray:
        """(heads * head,) what a row takes from the keys before `last`, seen from position `row`."""
        first = max(row - self.shape.window + 1, 0) if self.shape.sliding[layer] else 0
        groups = self.shape.heads // keys.shape[1]
        keys, values = (np.repeat(part[first:last], groups, axis=1) for part in (keys, values))
        scores = np.einsum("hd,khd->hk", query, keys)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        found: FloatArray = np.einsum("hk,khd->hd", shares, values).ravel().astype(np.float32)
        return found

    def _after_attention(self, layer: int, x: FloatArray, attended: FloatArray) -> FloatArray:
        x = x + self._normed(
            attended @ self._of(layer, "attn_output").T, self._of(layer, "post_attention_norm")
        )
        normed = self._normed(x, self._of(layer, "ffn_norm"))
        gated = _gelu(normed @ self._of(layer, "ffn_gate").T) * (normed @ self._of(layer, "ffn_up").T)
        x = x + self._normed(gated @ self._of(layer, "ffn_down").T, self._of(layer, "post_ffw_norm"))
        found: FloatArray = x * self._of(layer, "layer_output_scale")
        return found


class GemmaReference(_Layers):
    """A Gemma 4 with given weights, by their names in a GGUF file."""

    def read(self, tokens: Sequence[int]) -> ReadTokens:
        """Read a text from its beginning."""
        shape = self.shape
        positions = range(len(tokens))
        x = self.weights["token_embd.weight"][list(tokens)] * np.float32(np.sqrt(shape.width))
        all_keys, all_values = [], []
        for layer in range(len(shape.sliding)):
            normed = self._normed(x, self._of(layer, "attn_norm"))
            as_heads = (len(tokens), shape.heads_kv, shape.head_of(layer))
            keys = self._normed(
                (normed @ self._of(layer, "attn_k").T).reshape(as_heads), self._of(layer, "attn_k_norm")
            )
            keys = self._rotated(keys, positions, layer)
            values = self._normed((normed @ self._of(layer, "attn_v").T).reshape(as_heads))
            query = self._queries(layer, normed, positions)
            attended = np.stack(
                [self._attended(layer, query[row], keys, values, row, row + 1) for row in positions]
            )
            x = self._after_attention(layer, x, attended)
            all_keys.append(keys)
            all_values.append(values)
        states = self._normed(x, self.weights["output_norm.weight"])
        return ReadTokens(states, tuple(all_keys), tuple(all_values))

    def logits(self, states: FloatArray) -> FloatArray:
        """(rows, n_vocab) the logits of last states."""
        found: FloatArray = states @ self.weights["output.weight"].T
        return found


class AssistantReference(_Layers):
    """An assistant with given weights, beside its target.

    Args:
        embedding: (n_vocab, target_width) of the target's tokens.
    """

    def __init__(self, shape: GemmaShape, weights: Weights, embedding: FloatArray) -> None:
        super().__init__(shape, weights)
        self._embedding = embedding

    def draft(
        self, text: ReadTokens, tokens: Sequence[int], features: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Read tokens behind a text.

        All rows have the position behind the text, and see what the target has cached of it.

        Args:
            text: without these tokens.
            features: (rows, target_width) that are read beside the tokens.

        Returns:
            The logits (rows, n_vocab), and the features (rows, target_width) for tokens that follow.
        """
        shape = self.shape
        after = len(text.states)
        embedded = self._embedding[list(tokens)] * np.float32(np.sqrt(shape.target_width))
        x = np.concatenate([embedded, features], axis=1) @ self.weights["nextn.pre_projection.weight"].T
        for layer, sliding in enumerate(shape.sliding):
            shared = -2 if sliding else -1  # of the target's layers
            query = self._queries(layer, self._normed(x, self._of(layer, "attn_norm")), [after] * len(tokens))
            attended = np.stack(
                [
                    self._attended(layer, row, text.keys[shared], text.values[shared], after, after)
                    for row in query
                ]
            )
            x = self._after_attention(layer, x, attended)
        states = self._normed(x, self.weights["output_norm.weight"])
        return (
            states @ self.weights["token_embd.weight"].T,
            states @ self.weights["nextn.post_projection.weight"].T,
        )


def _gelu(x: FloatArray) -> FloatArray:
    """The usual approximation by a hyperbolic tangent."""
    found: FloatArray = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return found
