"""Weights of a GGUF file as arrays, and back into a file.

Tuned matrices are written in their own type if it is as fine as Q8_0, and else in Q8_0: weights that come
from few bits stand on the grid of their type, and training moves most of them by less than half a step of it.
Everything that was not changed keeps its bytes.
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
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader

Weights = dict[str, NDArray[np.float32]]

_PLAIN = (Kind.F32, Kind.F16)
_FINE = (*_PLAIN, Kind.BF16, Kind.Q8_0)
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


def write_weights(
    source: Path,
    destination: Path,
    tuned: Mapping[str, NDArray[np.float32]],
    note: str,
) -> None:
    """Write a copy of `source` in which the tensors in `tuned` have these values.

    Args:
        tuned: by name, rows first. Vectors are written in F32.
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
        _add(writer, tensor, tuned.get(tensor.name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, tensor: Any, values: NDArray[np.float32] | None) -> None:
    kind, data = tensor.tensor_type, tensor.data
    if values is not None and values.ndim == 1:
        kind, data = Kind.F32, values
    elif values is not None:
        kind = kind if kind in _FINE else Kind.Q8_0
        data = gguf.quantize(values, kind)
    # The writer takes floats as they are, and everything else as bytes of a type.
    writer.add_tensor(tensor.name, data, raw_dtype=None if kind in _PLAIN else kind)
