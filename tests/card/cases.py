"""The placements of a run: EdgeSpec's today, llama.cpp's own, and those to choose from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import layer_sizes, output_bytes
from tests.card.passes import Placement

ALL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BESIDE = 1 << 30  # bytes of a card's memory for its driver, compute buffers and the cells of 512 tokens
_DEPTH = 4096


@dataclass(frozen=True)
class Case:
    """A placement, and the bound of sending products to the card, which ggml reads when it starts.

    Attributes:
        bound: rows; 0 leaves it to ggml, which takes 32.
        limited: whether the card's memory is limited.
    """

    label: str
    placement: Placement
    bound: int = 0
    limited: bool = True


@dataclass(frozen=True)
class Sizes:
    """What fits on a card.

    Attributes:
        n_layers: of the model.
        whole: layers that fit, beside the output.
        ffn_here: layers whose feed-forward weights do not fit, if attention and output of all do.
    """

    n_layers: int
    whole: int
    ffn_here: int


def sizes_within(model: Path, limit: int, cells: int = 0) -> Sizes:
    """What fits on a card with so many bytes free.

    Args:
        cells: tokens whose keys and values are there beside the usual ones.
    """
    header = read_header(model)
    files = ModelFiles.of(header)
    shape = {key.partition(".")[2]: value for key, value in header.metadata.items()}
    cell = 4 * int(shape["attention.head_count_kv"]) * int(shape["attention.key_length"])  # bytes, of a layer
    layers = layer_sizes(files)
    tensors = [tensor for header in files.headers for tensor in header.tensors]
    ffn = sum(tensor.n_bytes for tensor in tensors if ".ffn_" in tensor.name) // len(layers)
    room = limit - min(_BESIDE, limit // 4) - output_bytes(files)
    whole = max(min(room // (max(layers) + cells * cell), len(layers)), 0)
    beside = sum(layers) - ffn * len(layers)
    room -= beside + cells * cell * len(layers)
    ffn_there = max(min(room // ffn, len(layers)), 0)
    return Sizes(len(layers), int(whole), len(layers) - int(ffn_there))


def cases_of(
    model: Path, device: str, limit: int, *, threads: int, seconds: float, rows: tuple[int, ...]
) -> Iterator[Case]:
    """The cases for one model, the most telling first."""
    fits = sizes_within(model, limit)
    base = Placement(str(model), rows=rows, seconds=seconds, threads=threads)
    card = replace(base, device=device, layers=fits.n_layers)
    layers = replace(base, device=device, layers=fits.whole)
    ffn = replace(card, cpu_ffn=fits.ffn_here)
    both = (0, 1)
    k, m = fits.whole, fits.ffn_here
    yield Case(f"-ncffn {m}, pinned", replace(ffn, offload=both), 1)
    yield Case(f"-ngl {k + 1}, pinned", replace(layers, offload=both), 1)
    yield Case("processor, EdgeSpec's layouts", own(base))
    yield Case(f"-ncffn {m}, EdgeSpec's layouts", replace(own(ffn), offload=(0,)))
    yield Case(f"-ngl {k + 1}, EdgeSpec's layouts", replace(own(layers), offload=(0,)))
    yield Case(f"-ncffn {m}, streamed", replace(ffn, streamed=True, offload=both), 1)
    yield Case(f"-ncffn {m}, mapped", replace(ffn, memory_map=True, offload=both), 1)
    yield Case("processor, plain", base)
    yield Case(f"-ncffn {m}, pinned, ggml's own bound", replace(ffn, offload=(32,)))
    deep = {"depth": _DEPTH, "rows": tuple(n for n in rows if n in (1, 8, 256)), "offload": (9,)}
    if max(rows) == max(ALL_ROWS):
        less = sizes_within(model, limit, _DEPTH)
        ffn_deep, layers_deep = replace(ffn, cpu_ffn=less.ffn_here), replace(layers, layers=less.whole)
        after = f"pinned, after {_DEPTH} tokens"
        yield Case(f"-ncffn {less.ffn_here}, {after}", replace(ffn_deep, **deep), 9)
        yield Case(f"-ngl {less.whole + 1}, {after}", replace(layers_deep, **deep), 9)
    yield Case(f"-ngl {k + 1}, mapped", replace(layers, memory_map=True, offload=both), 1)
    yield Case("all on the card", card, limited=False)


def own(placement: Placement) -> Placement:
    """The same, with what is in memory in EdgeSpec's layouts."""
    return replace(placement, pinned=False, rearranged=True)
