"""A network of the llama family in torch, with the weights of a GGUF file and llama.cpp's arithmetic.

Embeddings and output layer stay as they are: they are most of a small drafter, are shared with each other in
many models, and hardly gain from little data. Everything inside the layers, and the last norm, is trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from edgespec.drafting.tuning.shape import Shape

_FROZEN = ("token_embd.weight", "output.weight", "rope_freqs.weight")


class Network:
    """The network.

    Args:
        weights: every tensor of the file by its name, rows first, in float32; taken over, not copied.

    Attributes:
        weights: the same as torch tensors.
    """

    def __init__(self, shape: Shape, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self.shape = shape
        self.weights = {name: torch.from_numpy(values) for name, values in weights.items()}
        for name, weight in self.trained().items():
            weight.requires_grad_(name not in _FROZEN)

    def trained(self) -> dict[str, Tensor]:
        """The weights that are trained, by name."""
        return {name: weight for name, weight in self.weights.items() if name not in _FROZEN}

    def hidden(self, tokens: Tensor) -> Tensor:
        """(texts, length, width) what the output layer reads.

        Args:
            tokens: (texts, length); texts begin at position 0, and padding stands behind them.
        """
        shape, length = self.shape, tokens.shape[1]
        x = F.embedding(tokens, self.weights["token_embd.weight"]) * shape.embedding_scale
        turns = self._turns(length, shape.base, shape.rope_scale)
        local_turns, window = turns, None
        if shape.local_base is not None:
            local_turns = self._turns(length, shape.local_base, 1.0)
            window = _window_mask(length, shape.window)
        for layer in range(shape.layers):
            local = shape.is_local(layer)
            x = self._layer(layer, x, local_turns if local else turns, window if local else None)
        return self._norm(x, "output_norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., n_vocab) the output layer."""
        weight = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return F.linear(hidden, weight)

    def _layer(self, layer: int, x: Tensor, turns: tuple[Tensor, Tensor], window: Tensor | None) -> Tensor:
        part = f"blk.{layer}."
        attended = self._attention(part, self._norm(x, f"{part}attn_norm.weight"), turns, window)
        x = x + self._optional_norm(attended, f"{part}post_attention_norm.weight")
        y = self._norm(x, f"{part}ffn_norm.weight")
        gate = self._linear(y, f"{part}ffn_gate")
        gate = F.gelu(gate, approximate="tanh") if self.shape.gelu else F.silu(gate)
        y = self._linear(gate * self._linear(y, f"{part}ffn_up"), f"{part}ffn_down")
        return x + self._optional_norm(y, f"{part}post_ffw_norm.weight")

    def _attention(self, part: str, x: Tensor, turns: tuple[Tensor, Tensor], window: Tensor | None) -> Tensor:
        shape = self.shape
        texts, length, _ = x.shape

        def heads(name: str, count: int) -> Tensor:
            return self._linear(x, f"{part}{name}").view(texts, length, count, shape.head)

        queries = self._optional_norm(heads("attn_q", shape.heads), f"{part}attn_q_norm.weight")
        keys = self._optional_norm(heads("attn_k", shape.kv_heads), f"{part}attn_k_norm.weight")
        values = heads("attn_v", shape.kv_heads)
        queries, keys = (_rotated(part, turns, shape) for part in (queries, keys))
        groups = shape.heads // shape.kv_heads
        keys, values = (part.repeat_interleave(groups, dim=2) for part in (keys, values))
        kind = values.dtype  # bfloat16 where products are
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2).to(kind),
            keys.transpose(1, 2).to(kind),
            values.transpose(1, 2).to(kind),
            attn_mask=window,
            is_causal=window is None,
            scale=shape.attention_scale,
        )
        return self._linear(attended.transpose(1, 2).flatten(2), f"{part}attn_output")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.epsilon)
        return x * scale * self.weights[name]

    def _optional_norm(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name) if name in self.weights else x

    def _turns(self, length: int, base: float, scale: float) -> tuple[Tensor, Tensor]:
        """(length, rotated / 2) cosine and sine of the angle by which each pair turns at each position."""
        rotated = self.shape.rotated
        speed = base ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        if (factors := self.weights.get("rope_freqs.weight")) is not None:
            speed = speed / factors.double()
        angles = torch.outer(torch.arange(length, dtype=torch.float64) * scale, speed)
        return angles.cos().float(), angles.sin().float()


def _rotated(x: Tensor, turns: tuple[Tensor, Tensor], shape: Shape) -> Tensor:
    """(texts, length, heads, head) with each pair of its first `shape.rotated` elements turned (RoPE)."""
    cosine, sine = (part[:, None] for part in turns)
    x, rest = x.float()[..., : shape.rotated], x[..., shape.rotated :]
    if shape.neighbours:
        first, second = x[..., ::2], x[..., 1::2]
        turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    return torch.cat([turned, rest.float()], -1) if rest.shape[-1] else turned


def _window_mask(length: int, window: int) -> Tensor:
    """(length, length) whether a row sees a token: those up to its own, and at most `window` of them."""
    behind = torch.arange(length)[:, None] - torch.arange(length)
    return (behind >= 0) & (behind < window)
