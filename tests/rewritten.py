"""Models written anew with changes: embeddings that are not tied, and fewer tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.tiny import finish, first_tokens, vocabulary_fields

Tensors = dict[str, tuple[NDArray[Any], gguf.GGMLQuantizationType]]


def write_untied(source: Path, destination: Path) -> Path:
    """Write a model with tied embeddings anew: with a copy of them as its output matrix."""
    return _write(source, destination, {}, lambda tensors: {"output.weight": tensors["token_embd.weight"]})


def write_with_first_tokens(source: Path, destination: Path, n_tokens: int) -> Path:
    """Write a model with tied embeddings anew, with the first tokens of its vocabulary alone."""
    tokens, merges = first_tokens(source, n_tokens)
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": vocabulary_fields(source)["tokenizer.ggml.token_type"][0][:n_tokens],
        "tokenizer.ggml.merges": merges,
        "llama.vocab_size": n_tokens,
    }

    def first_rows(tensors: Tensors) -> Tensors:
        rows, kind = tensors["token_embd.weight"]
        return {"token_embd.weight": (rows[:n_tokens], kind)}

    return _write(source, destination, changed, first_rows)


def _write(
    source: Path, destination: Path, changed: Mapping[str, Any], amended: Callable[[Tensors], Tensors]
) -> Path:
    """Write a model anew with other values of some keys, and with some tensors added or replaced."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(destination, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        value = changed[name] if name in changed else field.contents()
        writer.add_key_value(name, value, field.types[0], sub_type=sub_type)
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, (data, kind) in (tensors | amended(tensors)).items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    finish(writer)
    return destination
