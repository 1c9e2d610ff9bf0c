"""Makes a model larger without changing its output, as a stand-in for models too large to download.

    python -m benchmarks.widen small.gguf large.gguf 20GiB

Every feed-forward block gets additional hidden units that have no effect: their rows in the gate and up
projections are noise, their columns in the down projection are zero. The tokens are those of the small model,
the bytes and the arithmetic those of a large one. Figures from such a model must be labelled as widened.

The result is written tensor by tensor, so it may be larger than memory. Its metadata says what it is:
`general.name` ends in "(widened)", and `edgespec.widened_from` names the original.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from edgespec.base.units import parse_size
from edgespec.files.writing import atomic_large_write

Bytes = NDArray[np.uint8]

_FEED_FORWARD = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.weight")
_STEP = 256  # hidden units are added in multiples of this, which every kernel layout supports
_CHUNK = 32 << 20


@dataclass(frozen=True)
class _BlockFormat:
    """A quantization's blocks: scales that give noise of the usual size, and their offset in a block."""

    scales: tuple[float, ...]
    at: int = 0  # bytes


_BLOCKS: dict[Kind, _BlockFormat] = {
    Kind.Q4_0: _BlockFormat((0.005,)),
    Kind.Q4_1: _BlockFormat((0.005, -0.04)),
    Kind.Q5_0: _BlockFormat((0.0025,)),
    Kind.Q5_1: _BlockFormat((0.0025, -0.04)),
    Kind.Q8_0: _BlockFormat((0.0003,)),
    Kind.Q4_K: _BlockFormat((0.0002, 0.0015)),
    Kind.Q5_K: _BlockFormat((0.0001, 0.0015)),
    Kind.Q6_K: _BlockFormat((0.00002,), at=208),
}


def widen(source: Path, destination: Path, target_bytes: int) -> Path:
    """Write a model of about `target_bytes` that gives the same tokens as `source`; returns `destination`."""
    reader = gguf.GGUFReader(source)
    wide = [tensor for tensor in reader.tensors if _FEED_FORWARD.fullmatch(tensor.name)]
    kinds = {tensor.tensor_type for tensor in wide}
    if not wide or kinds - _BLOCKS.keys():
        raise ValueError(f"{source} cannot be widened: dense feed-forward blocks of {[*_BLOCKS]} can")
    key = f"{_text(reader, 'general.architecture')}.feed_forward_length"
    units = int(reader.fields[key].contents())
    a_unit = sum(int(tensor.n_bytes) for tensor in wide) / units
    extra = round((target_bytes - source.stat().st_size) / a_unit / _STEP) * _STEP
    if extra <= 0:
        raise ValueError(f"{source} has {source.stat().st_size} bytes; {target_bytes} must be larger")
    partial = destination.with_name(destination.name + ".partial")
    with atomic_large_write(destination, partial):
        _write(reader, partial, source, {key: units + extra}, extra)
    return destination


def _write(
    reader: gguf.GGUFReader,
    path: Path,
    source: Path,
    changed: dict[str, int],
    extra: int,
) -> None:
    writer = gguf.GGUFWriter(path, _text(reader, "general.architecture"))
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.name"):
            continue
        value = changed.get(name, entry.contents())
        kind = entry.types[0]
        writer.add_key_value(name, value, kind, sub_type=entry.types[-1] if len(entry.types) > 1 else None)
    writer.add_string("general.name", f"{_text(reader, 'general.name') or source.stem} (widened)")
    writer.add_string("edgespec.widened_from", source.name)
    for tensor in reader.tensors:
        rows = [int(n) for n in reversed(tensor.shape)]
        match = _FEED_FORWARD.fullmatch(tensor.name)
        if match:
            rows[-1 if match[1] == "down" else 0] += extra
        elements, block = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        row_bytes = rows[-1] // elements * block
        n_bytes = int(np.prod(rows[:-1])) * row_bytes
        shape: list[int] = rows
        if elements > 1 or tensor.tensor_type not in (Kind.F32, Kind.F16):
            shape = [*rows[:-1], row_bytes]
            writer.add_tensor_info(
                tensor.name, shape, np.dtype(np.uint8), n_bytes, raw_dtype=tensor.tensor_type
            )
        else:
            kind_of = np.dtype(np.float32 if tensor.tensor_type == Kind.F32 else np.float16)
            writer.add_tensor_info(tensor.name, shape, kind_of, n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    out = writer.fout[0]
    noise = np.random.default_rng(0)
    for tensor in reader.tensors:
        writer.write_padding(out, out.tell())
        data: Bytes = np.ascontiguousarray(tensor.data).view(np.uint8)
        match = _FEED_FORWARD.fullmatch(tensor.name)
        if match and match[1] == "down":
            _write_with_columns(out.write, data, tensor.tensor_type, extra)
        else:
            out.write(data.data)
            if match:
                _write_noise(out.write, data.shape[-1], tensor.tensor_type, extra, noise)
        writer.write_padding(out, out.tell())
    writer.close()


def _write_with_columns(write: Callable[[Any], Any], data: Bytes, kind: Kind, extra: int) -> None:
    """Write the rows, each followed by `extra` columns of exact zeros."""
    elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    # With a scale and a minimum of zero, all values are zero.
    zeros = np.zeros((len(data), extra // elements * n_bytes), np.uint8)
    write(np.concatenate([data, zeros], axis=1).data)


def _write_noise(
    write: Callable[[Any], Any], row_bytes: int, kind: Kind, rows: int, noise: np.random.Generator
) -> None:
    block = _BLOCKS[kind]
    _, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    scales = np.array(block.scales, np.float16).view(np.uint8)
    step = max(_CHUNK // row_bytes, 1)
    for start in range(0, rows, step):
        n = min(step, rows - start)
        blocks = noise.integers(0, 256, (n * row_bytes // n_bytes, n_bytes), dtype=np.uint8)
        blocks[:, block.at : block.at + len(scales)] = scales
        write(blocks.data)


def _text(reader: gguf.GGUFReader, name: str) -> str:
    entry = reader.fields.get(name)
    return str(entry.contents()) if entry else ""


if __name__ == "__main__":
    print(widen(Path(sys.argv[1]), Path(sys.argv[2]), parse_size(sys.argv[3])))
