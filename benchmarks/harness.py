"""Helpers that the benchmarks share: options, tables, processes for single rows, hollow models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.capped import run_capped
from edgespec.models.gguf.weightless import ModelShape, hollow_files


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the description, a module's docstring, as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_head(*columns: str) -> None:
    """Print the head of a Markdown table."""
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")


def measured_apart(module: str, arguments: Sequence[str], cap: int | None = None) -> dict[str, Any]:
    """Run a module in a process of its own; returns the JSON object that it prints last.

    "peak_bytes" is added: the peak memory of its control group, page cache included, or 0 without a group.
    The result is {"killed": True} if the system killed it for exceeding the cap.

    Args:
        cap: bytes of the control group; None for none.
    """
    child = run_capped([sys.executable, "-m", module, *arguments], cap)
    if child.killed:
        return {"killed": True}
    if child.status:
        print(child.errors, file=sys.stderr)
        raise SystemExit(f"{module} {' '.join(arguments)} ended with status {child.status}")
    result: dict[str, Any] = json.loads(child.output.splitlines()[-1])
    return {**result, "peak_bytes": child.peak_bytes}


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
