"""Weights of a GGUF file as arrays, and back into a file of the same kind.

Tuned weights are written in F16 beside everything that was not changed, which keeps its bytes. llama.cpp's
own quantizer then makes the drafter's types of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from edgespec.drafting.tuning.network.shape import NetworkShape, shape_of
from edgespec.errors import BackendError, ModelFileError
from edgespec.llama.build import quantization_name
from edgespec.llama.quantize import QUANTIZATIONS
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader

Weights = dict[str, NDArray[np.float32]]

_FALLBACK = "q4_0"
_EXACT = (Kind.F32, Kind.F16, Kind.BF16)
# What the gguf package quantizes to, just as llama.cpp does.
WRITABLE = (*_EXACT, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
# Of the first file's own layout, or written by the writer itself.
_NOT_COPIED = re.compile(
    r"GGUF\..*|general\.(architecture|alignment|file_type|quantization_version)|split\..*"
)


@dataclass(frozen=True)
class ModelWeights:
    """A model's shape and its weights in float32, rows first."""

    shape: NetworkShape
    weights: Weights


def check_tunable(header: GGUFHeader) -> NetworkShape:
    """The shape of a model that can be tuned."""
    if len(split_paths(header)) > 1:
        raise BackendError(
            f"{header.path.name} is split into several files, which cannot be tuned.",
            "Name a drafter in a single file.",
        )
    return shape_of(header.metadata, {tensor.name for tensor in header.tensors}, header.path.name)


def load_weights(path: Path) -> ModelWeights:
    """All weights of a model, dequantized."""
    shape = check_tunable(read_header(path))
    weights: Weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelFileError(
                f"{tensor.name} of {path.name} is {tensor.tensor_type.name}, which cannot be read.",
                "Name a drafter with another quantization.",
            ) from error
        weights[tensor.name] = np.array(values, dtype=np.float32)
    return ModelWeights(shape, weights)


def matrix_kinds(header: GGUFHeader) -> dict[str, str]:
    """ggml's name of the type of every matrix inside the layers, by the matrix's name."""
    return {
        tensor.name: Kind(tensor.type_id).name
        for tensor in header.tensors
        if len(tensor.shape) > 1 and tensor.name.startswith("blk.")
    }


def quantization_of(header: GGUFHeader) -> str:
    """The quantization that a file says to have, if one can be made; otherwise Q4_0."""
    name = quantization_name(header).lower()
    return name if name in QUANTIZATIONS else _FALLBACK


def write_weights(
    source: Path,
    destination: Path,
    tuned: Mapping[str, NDArray[np.float32]],
    note: str,
    kind: Kind | None = Kind.F16,
) -> None:
    """Write a copy of `source` in which the tensors in `tuned` have these values.

    Args:
        tuned: by name, rows first. Vectors are written in F32.
        kind: type of the matrices among them; one of WRITABLE. None is that which each had.
        note: says what the tuning was. It also sets the file's header, and what is remembered by it, apart
            from those of an equally shaped drafter.

    Raises:
        OSError: the file cannot be written.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(destination, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if not _NOT_COPIED.fullmatch(name) and name != "edgespec.tuned":
            kinds = entry.types
            writer.add_key_value(
                name, entry.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None
            )
    writer.add_string("edgespec.tuned", note)
    for tensor in reader.tensors:
        _add(writer, tensor, tuned.get(tensor.name), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, tensor: Any, values: NDArray[np.float32] | None, kind: Kind | None) -> None:
    if values is not None and values.ndim == 1:
        writer.add_tensor(tensor.name, values)
    elif values is not None:
        kind = kind if kind is not None else tensor.tensor_type
        # The writer takes floats as they are, and everything else as bytes of a type.
        raw = None if kind in _EXACT[:2] else kind
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=raw)
    elif tensor.tensor_type in _EXACT[:2]:
        writer.add_tensor(tensor.name, tensor.data)
    else:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
