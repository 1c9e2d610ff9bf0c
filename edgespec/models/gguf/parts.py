"""Layers divided into parts: matrices that a pass reads one after another, and that are streamed together.

Slots hold parts, so small parts leave more of a budget for weights that stay in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise

from edgespec.models.gguf.layers import FileTensor, Layer


@lru_cache(maxsize=16)
def split_layers(
    layers: tuple[Layer, ...], reading_order: tuple[str, ...], part_bytes: int
) -> tuple[Layer, ...]:
    """The layers, the large ones of them divided, numbered anew in the order in which a pass reads them.

    Args:
        reading_order: names of matrices as a pass reads them; empty if that is not known.
        part_bytes: maximum size of a part; one matrix larger than that is a part alone.

    Returns:
        The layers themselves if a pass does not read them one after another, each matrix in one go, or if
        none is large.
    """
    streamed = {tensor.name for layer in layers for tensor in layer.tensors}
    names = [name for name, _ in groupby(name for name in reading_order if name in streamed)]
    rank = {name: number for number, name in enumerate(names)}
    if len(rank) < len(names) or not _one_after_another(layers, rank):
        return layers
    parts = [part for layer in layers for part in _parts(layer, rank, part_bytes)]
    if len(parts) == len(layers):
        return layers
    return tuple(Layer(number, _in_file_order(part)) for number, part in enumerate(parts))


def _one_after_another(layers: Sequence[Layer], rank: dict[str, int]) -> bool:
    """True if a pass reads all matrices of each layer before any of the next one's."""
    ranks = [[rank.get(tensor.name, -1) for tensor in layer.tensors] for layer in layers]
    known = all(min(of_layer) >= 0 for of_layer in ranks)
    return known and all(max(one) < min(following) for one, following in pairwise(ranks))


def _parts(layer: Layer, rank: dict[str, int], part_bytes: int) -> list[list[FileTensor]]:
    most = max(part_bytes, *(tensor.n_bytes for tensor in layer.tensors))
    parts: list[list[FileTensor]] = [[]]
    size = 0
    for tensor in sorted(layer.tensors, key=lambda tensor: rank[tensor.name]):
        if size + tensor.n_bytes > most:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.n_bytes
    return parts


def _in_file_order(part: Sequence[FileTensor]) -> tuple[FileTensor, ...]:
    return tuple(sorted(part, key=lambda tensor: (tensor.file, tensor.offset)))
