"""Model files with a header and no weights, for plans of models that are not here."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from edgespec.models.gguf.hollow import ModelShape, hollow_files


def write_hollow(path: Path, shape: ModelShape, quant: str = "Q4_K_M") -> Path:
    """A file with the header of a model of this shape, and a hole where its weights would be."""
    (header,) = hollow_files(path.stem, shape, quant).headers
    writer = gguf.GGUFWriter(path, shape.architecture)
    for key, value in shape.settings().items():
        writer.add_uint32(f"{shape.architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(shape.vocabulary)])
    for tensor in header.tensors:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        # The writer wants the shape of a raw type in bytes, rows first.
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        stored = (*reversed(tensor.shape[1:]), tensor.shape[0] // block * block_bytes)
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), tensor.n_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + header.alignment + header.file_bytes)
    return path
