"""The files of a model, and the layers whose weights can be streamed.

This needs no list of architectures: a layer is everything named `blk.N.`, and its matrices can be streamed.
Norms, biases and other small tensors stay in memory, as does everything outside the layers: embeddings,
output, rotation factors. Tables of which a pass looks up single rows can be left in the file.

Layers that predict further tokens (multi-token prediction, MTP) follow a model's own in some files. llama.cpp
loads them only where they draft, so they are kept apart from the model's: see `MTPLayers`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader, TensorInfo, as_count

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_SMALL = 16 << 10
_MTP_COUNT = "nextn_predict_layers"
_OF_HYBRIDS = ("ssm.", "full_attention_interval")  # settings of layers with a running state

LOOKED_UP = "per_layer_token_embd.weight"
"""Embeddings of tokens for each layer (Gemma 3n and 4): large, and each token reads one row."""
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
"""Embeddings of tokens, by which a pass multiplies only if there is no output matrix."""


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


def looked_up(headers: Iterable[GGUFHeader]) -> frozenset[str]:
    """The names of matrices of which passes of a model look up single rows, and multiply by none."""
    has_output = any(tensor.name == OUTPUT for header in headers for tensor in header.tensors)
    return frozenset((LOOKED_UP, EMBEDDING) if has_output else (LOOKED_UP,))


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
    # its layers for multi-token prediction, if it has some. The headers are without them.
    mtp: MTPLayers | None = None

    @classmethod
    def of(cls, header: GGUFHeader) -> ModelFiles:
        """All files of the model that `header` is the first or only file of."""
        paths = split_paths(header)
        return cls.of_headers([header if path == header.path else read_header(path) for path in paths])

    @staticmethod
    def of_headers(headers: Sequence[GGUFHeader]) -> ModelFiles:
        """The files with these headers; the model's layers for multi-token prediction are set apart."""
        first, count = _mtp_places(headers)
        if not count:
            return ModelFiles(tuple(headers))
        further = [_with_layers(header, first, first + count) for header in headers]
        own = [_with_layers(header, None, first) for header in headers]
        return ModelFiles(
            (_with_settings(own[0], first), *own[1:]),
            MTPLayers((of_plain_layers(further[0], count), *further[1:]), n_layers=count),
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(header.path for header in self.headers)

    @property
    def depends_on_context(self) -> bool:
        """True if texts change with the size of the cache: it has factors for long contexts (LongRoPE)."""
        tensors = (tensor for header in self.headers for tensor in header.tensors)
        return any(tensor.name.startswith("rope_factors_long") for tensor in tensors)

    def without(self, names: Collection[str]) -> ModelFiles:
        """Drop tensors: for what is left when these are elsewhere."""

        if not names:
            return self

        def left(header: GGUFHeader) -> GGUFHeader:
            return replace(header, tensors=tuple(t for t in header.tensors if t.name not in names))

        return ModelFiles(tuple(map(left, self.headers)))

    @property
    def tables(self) -> tuple[FileTensor, ...]:
        """Tables that can be left in the files, as no pass multiplies by them."""
        names = looked_up(self.headers)
        return tuple(
            _in_file(tensor, number)
            for number, header in enumerate(self.headers)
            for tensor in header.tensors
            if tensor.name in names
        )

    @property
    def tensor_bytes(self) -> int:
        return sum(header.tensor_bytes for header in self.headers)

    def layers(self) -> tuple[Layer, ...]:
        """The layers that have streamable weights, in order."""
        return self._layers

    def small_matrices(self, index: int) -> Layer:
        """The matrices of all layers that are too small to be streamed, as a layer with this number."""
        found = [
            _in_file(tensor, number)
            for number, header in enumerate(self.headers)
            for tensor in header.tensors
            if is_layer_weight(tensor.name) and len(tensor.shape) > 1 and not _streams(tensor)
        ]
        return Layer(index, tuple(sorted(found, key=lambda t: (t.file, t.offset))))

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


@dataclass(frozen=True)
class MTPLayers(ModelFiles):
    """The layers of a model that predict further tokens, as a drafter of its own.

    Its headers have the tensors of these layers and nothing else, and the settings of so many layers. Their
    paths are the model's.
    """

    n_layers: int = 1  # how many there are


def mtp_count(header: GGUFHeader) -> int:
    """Layers for multi-token prediction that a header tells of; the file may lack them."""
    return as_count(header.metadata.get(f"{header.architecture}.{_MTP_COUNT}")) or 0


def mtp_layers(path: Path) -> range:
    """The numbers of the layers for multi-token prediction in a model's files; empty if there are none."""
    files = ModelFiles.of(read_header(path))
    first = files.headers[0].block_count or 0
    return range(first, first + (files.mtp.n_layers if files.mtp else 0))


def is_layer_weight(name: str) -> bool:
    """True if a tensor's name is that of a layer's weight."""
    return _LAYER_TENSOR.fullmatch(name) is not None


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


def _mtp_places(headers: Sequence[GGUFHeader]) -> tuple[int, int]:
    """The first layer for multi-token prediction, and how many there are; 0 if the files lack them."""
    count = mtp_count(headers[0])
    first = (headers[0].block_count or 0) - count
    name = f"blk.{first}.nextn.eh_proj.weight"  # the matrix that joins a token and a feature
    held = count > 0 and any(tensor.name == name for header in headers for tensor in header.tensors)
    return (first, count) if held and first > 0 else (0, 0)


def _with_layers(header: GGUFHeader, first: int | None, end: int) -> GGUFHeader:
    """The header with layers `first` to `end` - 1 alone; if None, with those before `end` and all else."""

    def stays(tensor: TensorInfo) -> bool:
        parts = tensor.name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" and parts[1].isdigit() else None
        if first is None:
            return layer is None or layer < end
        return layer is not None and first <= layer < end

    return replace(header, tensors=tuple(filter(stays, header.tensors)))


def _with_settings(header: GGUFHeader, n_layers: int) -> GGUFHeader:
    """The header of a model without layers for multi-token prediction."""
    own = f"{header.architecture}."
    metadata = {key: value for key, value in header.metadata.items() if key != own + _MTP_COUNT}
    return replace(header, metadata=metadata | {f"{own}block_count": n_layers})


def of_plain_layers(header: GGUFHeader, n_layers: int) -> GGUFHeader:
    """The header of layers with attention, whatever the model's own have."""
    header = _with_settings(header, n_layers)
    hybrid = tuple(f"{header.architecture}.{kind}" for kind in _OF_HYBRIDS)
    metadata = {key: value for key, value in header.metadata.items() if not key.startswith(hybrid)}
    fingerprint = hashlib.blake2b(f"mtp {header.fingerprint}".encode(), digest_size=16).hexdigest()
    return replace(header, metadata=metadata, fingerprint=fingerprint)


def _in_file(tensor: TensorInfo, file: int) -> FileTensor:
    return FileTensor(tensor.name, tensor.type_id, tensor.shape, file, tensor.offset, tensor.n_bytes)


def _streams(tensor: TensorInfo) -> bool:
    return len(tensor.shape) >= 2 and min(tensor.shape[:2]) > 1 and tensor.n_bytes >= _SMALL
