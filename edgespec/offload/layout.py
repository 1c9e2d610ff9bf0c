"""Which weights of a model can be streamed, and where they are read from.

By rule, not by list: a layer is everything named `blk.N.`, and its matrices stream. Norms, biases and
other small tensors stay in memory, and so does all that belongs to no layer: embeddings, output,
rotation factors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.models.gguf.header import GGUFHeader, TensorInfo, read_header, split_paths
from edgespec.offload.reader import BLOCK

PIECE_BYTES = 4 << 20  # what one read brings

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_SMALL = 16 << 10
_GAP = 64 << 10  # tensors further apart than this are read separately


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
        """Bytes of its weights as they are in the file."""
        return sum(tensor.n_bytes for tensor in self.tensors)


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

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(header.tensor_bytes for header in self.headers)

    def layers(self) -> tuple[Layer, ...]:
        """The layers that have streamable weights, in order."""
        found: dict[int, list[FileTensor]] = {}
        for number, header in enumerate(self.headers):
            for tensor in header.tensors:
                match = _LAYER_TENSOR.fullmatch(tensor.name)
                if match and _streams(tensor):
                    found.setdefault(int(match[1]), []).append(
                        FileTensor(
                            tensor.name, tensor.type_id, tensor.shape, number, tensor.offset, tensor.n_bytes
                        )
                    )
        return tuple(
            Layer(index, tuple(sorted(found[index], key=lambda t: (t.file, t.offset))))
            for index in sorted(found)
        )


@dataclass(frozen=True)
class Piece:
    """What one read brings: `n_bytes` from `offset` of a file to byte `at` of the layer's slot.

    All three are multiples of a block; the last piece of a file may go beyond its end. `checksum` is
    over what is read, None where there is none.
    """

    file: int
    offset: int
    at: int
    n_bytes: int
    checksum: int | None = None


@dataclass(frozen=True)
class StoredLayer:
    """How a layer is read into a slot.

    Attributes:
        n_bytes: bytes of the slot it needs.
        places: tensor name to its offset in the slot.
    """

    index: int
    pieces: tuple[Piece, ...]
    places: Mapping[str, int]
    n_bytes: int


@dataclass(frozen=True)
class Store:
    """Where layers are read from: the model's own files, or one packed file.

    Attributes:
        kernels: tensor name to the name of the kernel layout it is stored in; plain ones are absent.
    """

    paths: tuple[Path, ...]
    layers: Mapping[int, StoredLayer]
    kernels: Mapping[str, str]
    packed: bool


def plain_store(files: ModelFiles, layers: Iterable[Layer]) -> Store:
    """The model's own files as a store."""
    return Store(files.paths, {layer.index: _stored(layer) for layer in layers}, {}, packed=False)


def pieces(file: int, offset: int, at: int, n_bytes: int) -> tuple[Piece, ...]:
    """A range cut into reads."""
    return tuple(
        Piece(file, offset + done, at + done, min(PIECE_BYTES, n_bytes - done))
        for done in range(0, n_bytes, PIECE_BYTES)
    )


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def pattern_of(names: Iterable[str]) -> list[str]:
    """Regular expressions that match exactly these layer tensors, few and short.

    llama.cpp compiles each anew for every tensor, so layers with the same tensors share one.
    """
    kinds: dict[int, set[str]] = {}
    for name in names:
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is no layer tensor")
        kinds.setdefault(int(match[1]), set()).add(match[2])
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, found in sorted(kinds.items()):
        groups.setdefault(tuple(sorted(found)), []).append(index)
    return [
        rf"^blk\.({'|'.join(map(str, group))})\.({'|'.join(re.escape(kind) for kind in kind_group)})\.weight$"
        for kind_group, group in groups.items()
    ]


def _streams(tensor: TensorInfo) -> bool:
    return len(tensor.shape) >= 2 and min(tensor.shape[:2]) > 1 and tensor.n_bytes >= _SMALL


def _stored(layer: Layer) -> StoredLayer:
    """Reads of whole blocks that cover the layer, and where its tensors come to lie."""
    reads: list[Piece] = []
    places: dict[str, int] = {}
    at = 0
    for run in _runs(layer.tensors):
        start = run[0].offset // BLOCK * BLOCK
        size = round_up(run[-1].offset + run[-1].n_bytes - start, BLOCK)
        reads += pieces(run[0].file, start, at, size)
        for tensor in run:
            places[tensor.name] = at + tensor.offset - start
        at += size
    return StoredLayer(layer.index, tuple(reads), places, at)


def _runs(tensors: tuple[FileTensor, ...]) -> list[list[FileTensor]]:
    """Tensors that lie so close together that they are read in one go."""
    runs: list[list[FileTensor]] = []
    for tensor in tensors:
        last = runs[-1][-1] if runs else None
        if last and last.file == tensor.file and tensor.offset - last.offset - last.n_bytes <= _GAP:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs
