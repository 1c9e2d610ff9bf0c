"""Models with an output matrix of their own, whose embeddings are only looked up."""

from __future__ import annotations

from pathlib import Path

import gguf


def write_untied(source: Path, destination: Path) -> Path:
    """Write a model with tied embeddings anew: with a copy of them as its output matrix."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(destination, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    tensors = [(tensor.name, tensor) for tensor in reader.tensors]
    (embedding,) = (tensor for name, tensor in tensors if name == "token_embd.weight")
    tensors.append(("output.weight", embedding))
    for name, tensor in tensors:
        writer.add_tensor_info(
            name, tensor.data.shape, tensor.data.dtype, tensor.n_bytes, raw_dtype=tensor.tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()
    return destination
