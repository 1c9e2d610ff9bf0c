"""A network of the llama family in torch, with the weights of a GGUF file and llama.cpp's arithmetic.

Embeddings and output layer stay as they are: they are most of a small drafter, are shared with each other in
many models, and hardly gain from little data. What is trained are the layers from some one on, and
the last norm.

Texts are packed: one after another without padding, each attending to itself alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from edgespec.drafting.tuning.network.shape import WHOLE, NetworkShape, TrainedExtent


class Network:
    """The network.

    Args:
        weights: every tensor of the file by its name, rows first, in float32; taken over, not copied.
        extent: what of it is trained.

    Attributes:
        weights: the same as torch tensors.
    """

    def __init__(
        self,
        shape: NetworkShape,
        weights: Mapping[str, NDArray[np.float32]],
        extent: TrainedExtent = WHOLE,
    ) -> None:
        self.shape = shape
        self.extent = extent
        self.weights = {name: torch.from_numpy(values) for name, values in weights.items()}
        for weight in self.trained().values():
            weight.requires_grad_(True)

    def trained(self) -> dict[str, Tensor]:
        """The weights that are trained, by name."""
        return {name: weight for name, weight in self.weights.items() if self.extent.trains(name)}

    def changed(self) -> dict[str, NDArray[np.float32]]:
        """The tensors that training changed, by name."""
        return {name: weight.detach().numpy() for name, weight in self.trained().items()}

    def hidden(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """(length of all texts, width) what the output layer reads.

        Args:
            tokens: (length of all texts) one text after another, each from position 0 on.
            lengths: of each text.
        """
        return self.upper(self.lower(tokens, lengths), lengths)

    def lower(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """(length, width) what the first trained layer reads: it never changes. Arguments as of `hidden`."""
        with torch.no_grad():
            x = F.embedding(tokens, self.weights["token_embd.weight"]) * self.shape.embedding_scale
            return self._through(range(self.extent.first), x, lengths)

    def upper(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """(length, width) what the output layer reads, from what `lower` returned."""
        x = self._through(range(self.extent.first, self.shape.layers), x, lengths)
        return self._norm(x, "output_norm.weight")

    @property
    def output(self) -> Tensor:
        """(n_vocab, width) the matrix of the output layer."""
        return self.weights.get("output.weight", self.weights["token_embd.weight"])

    def _through(self, layers: range, x: Tensor, lengths: Sequence[int]) -> Tensor:
        shape = self.shape
        places = torch.cat([torch.arange(length) for length in lengths])
        turns = self._turns(places, shape.base, shape.rope_scale)
        local_turns = turns if shape.local_base is None else self._turns(places, shape.local_base, 1.0)
        for layer in layers:
            local = shape.is_local(layer)
            window = shape.window if local else None
            x = self._layer(layer, x, local_turns if local else turns, lengths, window)
        return x

    def _layer(
        self,
        layer: int,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        window: int | None,
    ) -> Tensor:
        part = f"blk.{layer}."
        attended = self._attention(part, self._norm(x, f"{part}attn_norm.weight"), turns, lengths, window)
        x = x + self._optional_norm(attended, f"{part}post_attention_norm.weight")
        y = self._norm(x, f"{part}ffn_norm.weight")
        gate = self._linear(y, f"{part}ffn_gate")
        gate = F.gelu(gate, approximate="tanh") if self.shape.gelu else F.silu(gate)
        y = self._linear(gate * self._linear(y, f"{part}ffn_up"), f"{part}ffn_down")
        return x + self._optional_norm(y, f"{part}post_ffw_norm.weight")

    def _attention(
        self,
        part: str,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        window: int | None,
    ) -> Tensor:
        shape = self.shape

        def heads(name: str, count: int) -> Tensor:
            return self._linear(x, f"{part}{name}").view(len(x), count, shape.head)

        queries = self._optional_norm(heads("attn_q", shape.heads), f"{part}attn_q_norm.weight")
        keys = self._optional_norm(heads("attn_k", shape.kv_heads), f"{part}attn_k_norm.weight")
        values = heads("attn_v", shape.kv_heads)
        queries, keys = (_rotated(part, turns, shape) for part in (queries, keys))
        groups = shape.heads // shape.kv_heads
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        by_text = zip(*(_split(part, lengths) for part in (queries, keys, values.float())), strict=True)
        # In float32: the gradient of so little takes half as long as in bfloat16.
        with torch.autocast("cpu", enabled=False):
            attended = torch.cat([self._attended(*parts, window=window) for parts in by_text])
        return self._linear(attended.flatten(1), f"{part}attn_output")

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, *, window: int | None) -> Tensor:
        """(length, heads, head) of one text."""
        mask = None if window is None or len(queries) <= window else _window_mask(len(queries), window)
        # With a dimension of texts: without it, the attention that takes little memory is not used.
        return F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.shape.attention_scale,
        )[0].transpose(0, 1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.epsilon)
        return x * scale * self.weights[name]

    def _optional_norm(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name) if name in self.weights else x

    def _turns(self, places: Tensor, base: float, scale: float) -> tuple[Tensor, Tensor]:
        """(length, rotated / 2) cosine and sine of the angle by which each pair turns at each place."""
        rotated = self.shape.rotated
        speed = base ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        if (factors := self.weights.get("rope_freqs.weight")) is not None:
            speed = speed / factors.double()
        angles = torch.outer(places.double() * scale, speed)
        return angles.cos().float(), angles.sin().float()


def _rotated(x: Tensor, turns: tuple[Tensor, Tensor], shape: NetworkShape) -> Tensor:
    """(length, heads, head) with each pair of its first `shape.rotated` elements turned (RoPE)."""
    cosine, sine = (part[:, None] for part in turns)
    x, rest = x.float()[..., : shape.rotated], x[..., shape.rotated :]
    if shape.neighbours:
        first, second = x[..., ::2], x[..., 1::2]
        turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    return torch.cat([turned, rest.float()], -1) if rest.shape[-1] else turned


def _split(x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return x.split_with_sizes(list(lengths))


def _window_mask(length: int, window: int) -> Tensor:
    """(length, length) whether a row sees a token: those up to its own, and at most `window` of them."""
    behind = torch.arange(length)[:, None] - torch.arange(length)
    return (behind >= 0) & (behind < window)
