"""Tuned weights as a file that drafts: in the types that the drafter had, or in others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from edgespec.drafting.tuning.network.network import ROUNDED
from edgespec.drafting.tuning.network.weights import (
    WRITABLE,
    matrix_kinds,
    quantization_of,
    write_weights,
)
from edgespec.drafting.tuning.options import KEEP
from edgespec.files.writing import atomic_large_write, writing_to
from edgespec.llama.quantize import make_drafter
from edgespec.models.gguf.types import GGUFHeader

AS_BEFORE = KEEP
FINE = "q8_0"  # keeps all that is learned, in about twice the bytes of the usual types
_BLOCK = 32  # weights that share a scale
_WRITABLE = {kind.name for kind in WRITABLE}


def usual_type(start: GGUFHeader) -> str:
    """Return a drafter's default type: FINE, unless the types that it has are as fine.

    Weights that come from few bits stand on the grid of their type, and training moves most of them by less
    than half a step of it: rounded again, most of what was learned would be lost.
    """
    coarse = any(kind not in ("F32", "F16", "BF16", "Q8_0") for kind in matrix_kinds(start).values())
    rows = (tensor.shape[0] for tensor in start.tensors if len(tensor.shape) > 1)
    whole = all(length % _BLOCK == 0 for length in rows)
    return FINE if coarse and whole else AS_BEFORE


def rounded_types(start: GGUFHeader, quantization: str) -> dict[str, str]:
    """The types that matrices will be rounded to, by name, where training should account for that."""
    kinds = matrix_kinds(start)
    if quantization != AS_BEFORE:
        kinds = dict.fromkeys(kinds, quantization.upper())
    return {name: kind for name, kind in kinds.items() if kind in ROUNDED and kind.lower() != FINE}


def export(
    start: GGUFHeader,
    output: Path,
    tuned: Mapping[str, NDArray[np.float32]],
    note: str,
    quantization: str,
    threads: int | None,
) -> None:
    """Write a drafter like `start` in which the tensors in `tuned` have these values.

    Args:
        note: as of `write_weights`.
        quantization: AS_BEFORE or FINE, for tuned tensors alone; or one of llama.cpp's, for the whole file.
    """
    kinds = matrix_kinds(start)
    direct = quantization == FINE or (
        quantization == AS_BEFORE and all(kinds.get(name, "F32") in _WRITABLE for name in tuned)
    )
    partial = output.with_name(f"{output.name}.partial")
    whole = output.with_name(f"{output.stem}-f16.gguf")
    with writing_to(output, "Free some space on that disk."):
        if direct:
            with atomic_large_write(output, partial):
                kind = Kind.Q8_0 if quantization == FINE else None
                write_weights(start.path, partial, tuned, note, kind)
        else:
            with atomic_large_write(whole, partial):
                write_weights(start.path, partial, tuned, note)
    if not direct:
        into = quantization_of(start) if quantization == AS_BEFORE else quantization
        make_drafter(whole, output, quantization=into, threads=threads)
        whole.unlink()
