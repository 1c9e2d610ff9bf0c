"""Where the layers of a model are read from, and where in a slot their tensors end up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.files.direct_reader import BLOCK
from edgespec.models.gguf.layers import FileTensor, Layer, ModelFiles

PIECE_BYTES = 4 << 20  # of one read

_GAP = 64 << 10  # tensors further apart than this are read separately


@dataclass(frozen=True)
class Piece:
    """One read: `n_bytes` from `offset` of a file to byte `at` of the layer's slot.

    All three are multiples of a block; the last piece of a file may extend beyond its end. `checksum` is that
    of the bytes read, or None.
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
        n_bytes: size of the slot it needs.
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
        kernels: tensor name to the name of the kernel layout it is stored in; plain tensors are absent.
    """

    paths: tuple[Path, ...]
    layers: Mapping[int, StoredLayer]
    kernels: Mapping[str, str]
    packed: bool


def plain_store(files: ModelFiles, layers: Iterable[Layer]) -> Store:
    """The model's own files as a store."""
    return Store(files.paths, {layer.index: _stored(layer) for layer in layers}, {}, packed=False)


def pieces(file: int, offset: int, at: int, n_bytes: int) -> tuple[Piece, ...]:
    """A range divided into reads."""
    return tuple(
        Piece(file, offset + done, at + done, min(PIECE_BYTES, n_bytes - done))
        for done in range(0, n_bytes, PIECE_BYTES)
    )


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def _stored(layer: Layer) -> StoredLayer:
    """Reads of whole blocks that cover the layer, and where its tensors end up."""
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
    """Groups of tensors that are close enough to be read together."""
    runs: list[list[FileTensor]] = []
    for tensor in tensors:
        last = runs[-1][-1] if runs else None
        if last and last.file == tensor.file and tensor.offset - last.offset - last.n_bytes <= _GAP:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs
