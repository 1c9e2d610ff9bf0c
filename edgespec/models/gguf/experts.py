"""The experts of a mixture: which of a layer's weights they are, and one expert's part of each.

A layer of a mixture of experts has stacks of matrices, one matrix for each expert, and a router that chooses
a few of them for every token. Everything else of the layer is needed for every token: attention, the router,
shared experts, and the whole feed-forward block of the leading layers that many mixtures have.

This needs no list of architectures: llama.cpp names the stacks `ffn_..._exps`, whether gate and up are
separate or one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from edgespec.models.gguf.layers import FileTensor, Layer, ModelFiles, looked_up
from edgespec.models.gguf.types import GGUFHeader, TensorInfo, as_count

_STACK = re.compile(r"blk\.\d+\.ffn_\w+_exps\.weight")


@dataclass(frozen=True)
class LayerExperts:
    index: int
    n_experts: int
    tensors: tuple[FileTensor, ...]  # the stacks, in file order; each has shape (columns, rows, n_experts)

    @property
    def n_bytes(self) -> int:
        """Bytes of all of them in the file."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def parts(self, expert: int) -> tuple[FileTensor, ...]:
        """One expert's matrices, in the order of the stacks and with their names."""
        found = []
        for stack in self.tensors:
            size = stack.n_bytes // self.n_experts
            at = stack.offset + expert * size
            found.append(replace(stack, shape=stack.shape[:2], offset=at, n_bytes=size))
        return tuple(found)


@dataclass(frozen=True)
class LayerWeights:
    """A model's streamable weights, with the experts that are streamed one by one apart."""

    # what every token needs of each layer, or everything if no experts are apart; layers without such weights
    # are absent
    layers: tuple[Layer, ...]
    experts: tuple[LayerExperts, ...] = ()  # of each layer that has any; empty if whole layers are streamed
    n_used: int = 0  # experts that each token is sent to, in each of these layers

    @property
    def n_experts(self) -> int:
        return sum(layer.n_experts for layer in self.experts)

    @property
    def n_bytes(self) -> int:
        """Bytes of all of them in the file."""
        dense = sum(layer.n_bytes for layer in self.layers)
        return dense + sum(layer.n_bytes for layer in self.experts)

    def without(self, names: Collection[str]) -> LayerWeights:
        """Drop matrices, and all experts of a layer if one of their stacks is dropped; numbers stay."""
        rest = (Layer(x.index, tuple(t for t in x.tensors if t.name not in names)) for x in self.layers)
        experts = (x for x in self.experts if not any(t.name in names for t in x.tensors))
        return replace(self, layers=tuple(layer for layer in rest if layer.tensors), experts=tuple(experts))


def layer_weights(files: ModelFiles, layers: Iterable[Layer] | None = None) -> LayerWeights:
    """The weights of a model's layers, with its experts apart if it is a mixture of experts.

    Args:
        layers: some of the model's; None for all.
    """
    layers = files.layers() if layers is None else tuple(layers)
    used = n_used(files.headers[0])
    experts = [found for layer in layers if (found := _experts_of(layer)) is not None]
    if not experts or not used:
        return LayerWeights(tuple(layers))
    stacks = {stack for found in experts for stack in found.tensors}
    rest = (Layer(layer.index, tuple(t for t in layer.tensors if t not in stacks)) for layer in layers)
    return LayerWeights(tuple(layer for layer in rest if layer.tensors), tuple(experts), used)


def multiplied(files: ModelFiles) -> Iterator[tuple[TensorInfo, float]]:
    """The matrices that a pass multiplies by, each with the share of it that a token needs.

    Embeddings of which a pass only looks up rows are left out.
    """
    weights, headers = layer_weights(files), files.headers
    shares = {
        tensor.name: weights.n_used / layer.n_experts for layer in weights.experts for tensor in layer.tensors
    }
    tables = looked_up(headers)
    for header in headers:
        for tensor in header.tensors:
            if len(tensor.shape) > 1 and tensor.name not in tables:
                yield tensor, shares.get(tensor.name, 1.0)


def n_used(header: GGUFHeader) -> int:
    """Experts that each token is sent to, in each layer; 0 for a model without experts."""
    return as_count(header.metadata.get(f"{header.architecture}.expert_used_count")) or 0


def expert_by_expert(layer: Layer) -> Layer:
    """Reorder weights: first what every token needs, then expert after expert.

    A stack is then as many tensors as it has experts, all of its name.
    """
    experts = _experts_of(layer)
    if experts is None:
        return layer
    dense = [tensor for tensor in layer.tensors if tensor not in experts.tensors]
    parts = [part for expert in range(experts.n_experts) for part in experts.parts(expert)]
    return Layer(layer.index, (*dense, *parts))


def _experts_of(layer: Layer) -> LayerExperts | None:
    stacks = tuple(t for t in layer.tensors if _STACK.fullmatch(t.name) and len(t.shape) == 3)
    counts = {stack.shape[2] for stack in stacks}
    if len(counts) != 1:
        return None
    (count,) = counts
    return LayerExperts(layer.index, count, stacks) if count > 1 else None
