"""The files of a model, and the layers whose weights can be streamed.

This needs no list of architectures: a layer is everything named `blk.N.`, and its matrices can be streamed.
Norms, biases and other small tensors stay in memory, as does everything outside the layers: embeddings,
output, rotation factors. Tables of which a pass looks up single rows can be left in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader, TensorInfo

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_SMALL = 16 << 10

LOOKED_UP = "per_layer_token_embd.weight"
"""Embeddings of tokens for each layer (Gemma 3n and 4): large, and each token reads one row."""


@dataclass(frozen=True)
class FileTensor:
    """A weight in the model's files: `shape` begins with the row length, `file` counts from 0."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    file: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Layer:
    """The streamable weights of one layer, in file order."""

    index: int
    tensors: tuple[FileTensor, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its weights in the file."""
        return sum(tensor.n_bytes for tensor in self.tensors)


Kind = tuple[tuple[str, int, tuple[int, ...]], ...]


class _HasTensors(Protocol):
    @property
    def tensors(self) -> tuple[FileTensor, ...]: ...


def kind_of(layer: _HasTensors) -> Kind:
    """The names, types and shapes of a layer's weights, which layers of one kind share."""
    return tuple((t.name.split(".", 2)[2], t.type_id, t.shape) for t in layer.tensors)


def layers_of_each_kind(layers: Sequence[Layer]) -> int:
    """The number of first layers among which there is one of every kind: matrices of its shapes and types."""
    seen: set[frozenset[tuple[str, int, tuple[int, ...]]]] = set()
    needed = 0
    for count, layer in enumerate(layers, 1):
        kind = frozenset(kind_of(layer))  # in any order
        if kind not in seen:
            seen.add(kind)
            needed = count
    return needed


@dataclass(frozen=True)
class ModelFiles:
    """A model's files, in order, with their headers."""

    headers: tuple[GGUFHeader, ...]

    @classmethod
    def of(cls, header: GGUFHeader) -> ModelFiles:
        """All files of the model that `header` is the first or only file of.

        Raises:
            ModelFileError: a part is missing or damaged.
        """
        paths = split_paths(header)
        return cls(tuple(header if path == header.path else read_header(path) for path in paths))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return tuple(header.path for header in self.headers)

    def first_layers(self, count: int) -> ModelFiles:
        """Drop the layers from number `count` on: for what is left when these are elsewhere."""

        def stays(tensor: TensorInfo) -> bool:
            parts = tensor.name.split(".")
            return not (parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) >= count)

        return ModelFiles(
            tuple(replace(header, tensors=tuple(filter(stays, header.tensors))) for header in self.headers)
        )

    @property
    def tables(self) -> tuple[FileTensor, ...]:
        """Tables that can be left in the files, as no pass multiplies by them."""
        return tuple(
            _in_file(tensor, number)
            for number, header in enumerate(self.headers)
            for tensor in header.tensors
            if tensor.name == LOOKED_UP
        )

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(header.tensor_bytes for header in self.headers)

    def layers(self) -> tuple[Layer, ...]:
        """The layers that have streamable weights, in order."""
        return self._layers

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        found: dict[int, list[FileTensor]] = {}
        for number, header in enumerate(self.headers):
            for tensor in header.tensors:
                match = _LAYER_TENSOR.fullmatch(tensor.name)
                if match and _streams(tensor):
                    found.setdefault(int(match[1]), []).append(_in_file(tensor, number))
        return tuple(
            Layer(index, tuple(sorted(found[index], key=lambda t: (t.file, t.offset))))
            for index in sorted(found)
        )


def pattern_of(names: Iterable[str]) -> list[str]:
    """A few short regular expressions that match exactly these layer tensors.

    llama.cpp compiles each of them again for every tensor, so layers with the same tensors share one.
    """
    kinds: dict[int, set[str]] = {}
    for name in names:
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is not a layer tensor")
        kinds.setdefault(int(match[1]), set()).add(match[2])
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, found in sorted(kinds.items()):
        groups.setdefault(tuple(sorted(found)), []).append(index)
    return [
        rf"^blk\.({'|'.join(map(str, group))})\.({'|'.join(re.escape(kind) for kind in kind_group)})\.weight$"
        for kind_group, group in groups.items()
    ]


def _in_file(tensor: TensorInfo, file: int) -> FileTensor:
    return FileTensor(tensor.name, tensor.type_id, tensor.shape, file, tensor.offset, tensor.n_bytes)


def _streams(tensor: TensorInfo) -> bool:
    return len(tensor.shape) >= 2 and min(tensor.shape[:2]) > 1 and tensor.n_bytes >= _SMALL
