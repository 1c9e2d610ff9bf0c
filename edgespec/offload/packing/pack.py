"""The packed layer file: a model's layers in the CPU's kernel layouts, ready to be read into slots.

    block 0      magic, format version, where the index is, the index's checksum
    layers       each one contiguous range that begins and ends at a block; zeros between tensors
    experts      of each layer whose experts are streamed one by one: a record for each, which has its part of
                 every stack, and begins and ends at a block
    index        JSON: the model's fingerprint, the build, places, and a checksum for every piece

Where folders on several disks are named for it, the file has only the index, and each folder a part: block 0
with the token of the index, then pieces. Pieces of all layers alternate between the parts, see division.py.

Rearranged weights are valid only for one llama.cpp build on one kind of CPU, and for the model that they were
made from. The index names all three, and a file that does not match is made again. It is written under a
temporary name, synced and renamed, so it is complete or absent.

The weights it was made from are identified by a hash over every byte of each layer, computed while they are
packed; see sources.py for when the hashes are compared.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.files.positioned import BLOCK
from edgespec.kernels.layouts import KernelLayout, weight_layout
from edgespec.kernels.setting import AUTO, kernels_setting
from edgespec.llama.runtime.backend import build_identity
from edgespec.models.gguf.experts import LayerExperts, expert_by_expert
from edgespec.models.gguf.layers import FileTensor, Layer, ModelFiles
from edgespec.offload.layout import (
    EXPERT_PIECE_BYTES,
    PIECE_BYTES,
    ExpertRun,
    Store,
    StoredExperts,
    StoredLayer,
    pieces,
    round_up,
)
from edgespec.offload.packing.index import MAGIC, StalePack, indexed_parts, read_index
from edgespec.offload.packing.sources import (
    Sources,
    header_fingerprint,
    recall_sources,
)

PART_HEAD = struct.Struct("<8s16s")
_TENSOR_ALIGNMENT = 256  # above any kernel's needs


class PartGone(StalePack):
    """A part of a packed file that cannot be read; the text says which and why."""


def pack_path(folder: Path, files: ModelFiles, *, experts: bool = False) -> Path:
    """The path of a model's packed file, one for each setting of EDGESPEC_KERNELS.

    Args:
        experts: whether its experts can be read one by one.
    """
    header = files.headers[0]
    setting = kernels_setting()
    kernels = "" if setting == AUTO else f".{setting}"
    kind = ".experts" if experts else ""
    return folder / f"{header.path.stem}-{header.fingerprint[:16]}{kind}{kernels}.pack"


def piece_sizes(layers: Iterable[Layer], experts: Iterable[LayerExperts] = ()) -> Iterator[int]:
    """The sizes of a pack's pieces, in the order in which they are written."""
    whole = {layer.index: layer for layer in layers}
    singly = {found.index: found for found in experts}
    for number in sorted({*whole, *singly}):
        if number in whole:
            yield from (piece.n_bytes for piece in pieces(0, 0, 0, tensor_places(whole[number])[1]))
        if number in singly:
            size = record_places(singly[number])[1]
            record = [min(EXPERT_PIECE_BYTES, size - at) for at in range(0, size, EXPERT_PIECE_BYTES)]
            yield from record * singly[number].n_experts


def gains_from_packing(layers: Iterable[Layer]) -> bool:
    """True if any weight has a kernel layout of its own on this CPU."""
    return any(weight_layout(t.name, t.type_id, t.shape) for layer in layers for t in layer.tensors)


def packed_bytes(layers: Iterable[Layer], experts: Iterable[LayerExperts] = ()) -> int:
    """Bytes of the packed file without its index."""
    records = sum(found.n_experts * record_places(found)[1] for found in experts)
    return BLOCK + sum(tensor_places(layer)[1] for layer in layers) + records


def open_pack(
    path: Path,
    files: ModelFiles,
    on_progress: Callable[[float], None] = lambda _fraction: None,
    layers: tuple[Layer, ...] | None = None,
) -> Store:
    """A packed file as a store, if it holds this model's weights.

    Args:
        layers: the model's, or their parts, as they are to be streamed; without experts that are streamed
            singly. None for whole layers.
        on_progress: called with the fraction of the model that has been read, if it must be read to compare.

    Raises:
        PartGone: a part of it is gone, damaged or another pack's.
        StalePack: it does not exist, is damaged, or does not match this model, build and CPU.
    """
    try:
        index = read_index(path)
        if index["model"] != header_fingerprint(files):
            raise StalePack(f"{path.name} was made from another model")
        if index["build"] != build_identity():
            raise StalePack(f"{path.name} was made for another llama.cpp build or CPU")
        _check_parts(index)
        store, made_from = store_of(path, index), Sources.from_json(index["sources"])
        if layers is not None and _units(layers) != {i: set(s.places) for i, s in store.layers.items()}:
            raise StalePack(f"{path.name} has layers in other parts")
        if layers is None or store.experts:
            layers = files.layers()
        if store.experts:
            layers = tuple(expert_by_expert(layer) for layer in layers)
        if not recall_sources(path, made_from).fit(files, on_progress, layers):
            raise StalePack(f"{path.name} was made from other weights")
        return store
    except FileNotFoundError as error:
        raise StalePack(f"{path.name} does not exist") from error
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise StalePack(f"{path.name} cannot be read: {error}") from error


def _check_parts(index: Mapping[str, Any]) -> None:
    """Raise PartGone unless all parts are there, whole, and of the same packing as the index."""
    for part, found in zip(indexed_parts(index), index.get("parts", ()), strict=True):
        try:
            with part.open("rb") as file:
                head, n_bytes = file.read(PART_HEAD.size), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise PartGone(
                f"'{part}', a part of the packed layers, cannot be read: {error.strerror}"
            ) from error
        if head != PART_HEAD.pack(MAGIC, bytes.fromhex(index["token"])):
            raise PartGone(f"'{part}' is damaged, or a part of other packed layers")
        if n_bytes != found["n_bytes"]:
            raise PartGone(f"'{part}' is damaged: it has {n_bytes} bytes instead of {found['n_bytes']}")


def _units(layers: Iterable[Layer]) -> dict[int, set[str]]:
    return {layer.index: {tensor.name for tensor in layer.tensors} for layer in layers}


def tensor_places(layer: Layer) -> tuple[dict[str, int], int]:
    """The offset of each tensor in a packed layer, and the layer's size."""
    places: dict[str, int] = {}
    end = 0
    for tensor in layer.tensors:
        places[tensor.name] = end
        layout = weight_layout(tensor.name, tensor.type_id, tensor.shape)
        size = layout.packed_bytes(tensor.type_id, tensor.shape) if layout else tensor.n_bytes
        end = round_up(end + size, _TENSOR_ALIGNMENT)
    return places, round_up(end, BLOCK)


def packed_layer(layer: Layer) -> StoredLayer:
    """A packed layer, as if it were the first in its file."""
    places, n_bytes = tensor_places(layer)
    return StoredLayer(layer.index, pieces(0, 0, 0, n_bytes), places, n_bytes)


def record_places(experts: LayerExperts) -> tuple[dict[str, int], int]:
    """The offset of each matrix in the record of one expert, and the record's size."""
    places: dict[str, int] = {}
    end = 0
    for stack, part in zip(experts.tensors, experts.parts(0), strict=True):
        places[stack.name] = end
        layout = stack_layout(stack)
        size = layout.packed_bytes(part.type_id, part.shape) if layout else part.n_bytes
        end = round_up(end + size, _TENSOR_ALIGNMENT)
    return places, round_up(end, BLOCK)


def stack_layout(stack: FileTensor) -> KernelLayout | None:
    """The layout for a stack whose matrices are rearranged one by one; None if that is the file's own."""
    layout = weight_layout(stack.name, stack.type_id, stack.shape)
    if layout is None:
        return None
    # The kernels find a matrix by the stack's stride, so it must be as large alone as in the stack.
    whole, alone = (layout.packed_bytes(stack.type_id, shape) for shape in (stack.shape, stack.shape[:2]))
    return layout if whole == alone * stack.shape[2] else None


def store_of(path: Path, index: Mapping[str, Any]) -> Store:
    """A packed file with this index, as a store.

    Raises:
        StalePack: it has pieces of a different size.
    """
    if index["piece_bytes"] != PIECE_BYTES:
        raise StalePack(f"{path.name} has pieces of a different size")
    parts = indexed_parts(index)
    layers = {}
    for layer in index["layers"]:
        reads = pieces(0, layer["offset"], 0, layer["n_bytes"])
        if parts:
            reads = tuple(
                replace(piece, file=file, offset=offset)
                for piece, (file, offset) in zip(reads, layer["homes"], strict=True)
            )
        checked = tuple(
            replace(piece, checksum=checksum)
            for piece, checksum in zip(reads, layer["checksums"], strict=True)
        )
        layers[layer["index"]] = StoredLayer(layer["index"], checked, layer["places"], layer["n_bytes"])
    experts = {}
    for found in index.get("experts", ()):
        size = found["n_bytes"]
        run = ExpertRun(0, found["offset"], size, size, at=0)
        checksums = tuple(array("Q", of_expert) for of_expert in found["checksums"])
        if any(len(of_expert) != -(-size // EXPERT_PIECE_BYTES) for of_expert in checksums):
            raise StalePack(f"{path.name} has experts in pieces of another size")
        experts[found["index"]] = StoredExperts(
            found["index"], len(checksums), (run,), found["places"], size, checksums, found.get("homes", ())
        )
    return Store(
        parts or (path,),
        layers,
        index["kernels"],
        packed=True,
        experts=experts,
        spread=bool(parts),
        pack=path,
    )
