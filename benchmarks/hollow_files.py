"""Model files with a header and no weights, for plans of models that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

Shapes = Mapping[str, tuple[int, int, gguf.GGMLQuantizationType]]

_ALIGNMENT = 32


def write_hollow(writer: gguf.GGUFWriter, path: Path, shapes: Shapes) -> Path:
    """Finish a file whose settings were written, with a hole where its weights would be.

    Args:
        writer: writes to `path`.
        shapes: (rows, row length, type) of matrices, by name without ".weight".
    """
    total = 0
    for name, (rows, length, kind) in shapes.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = rows * length // block * block_bytes
        stored = (rows, length // block * block_bytes)  # the writer counts bytes of raw types
        writer.add_tensor_info(f"{name}.weight", stored, np.dtype(np.uint8), n_bytes, kind)
        total += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + _ALIGNMENT + total)
    return path
