"""The library's products through ctypes, random GGUF blocks, and references in float64."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from edgespec.kernels.native.build import SOURCES, build

Array = np.ndarray[Any, Any]

TYPES = (
    T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL, T.MXFP4,
    T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS, T.F16, T.BF16,
)  # fmt: skip
PER_256, PER_32, FLOATS = range(3)
PANEL = 16

# Where the half-precision scales of a block are.
_HALVES = {
    T.Q4_0: (0,), T.Q4_1: (0, 2), T.Q5_0: (0,), T.Q5_1: (0, 2), T.Q8_0: (0,), T.IQ4_NL: (0,), T.MXFP4: (),
    T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,), T.IQ4_XS: (0,),
}  # fmt: skip


def block_values(kind: T) -> int:
    """The values of a block, of which a row has a multiple."""
    return 1 if kind in (T.F16, T.BF16) else GGML_QUANT_SIZES[kind][0]


def random_blocks(kind: T, n: int, k: int, random: np.random.Generator, fill: int | None = None) -> Array:
    """Rows as in a GGUF file: any quants, scales of a usual size.

    Args:
        fill: the value of every byte but those of float scales.
    """
    if kind is T.F16:
        return random.normal(0, 0.05, (n, k)).astype(np.float16).view(np.uint8)
    if kind is T.BF16:
        bits = random.normal(0, 0.05, (n, k)).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    values, size = GGML_QUANT_SIZES[kind]
    count = n * k // values
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    if fill is not None:
        blocks[:] = fill
    if kind is T.MXFP4:
        blocks[:, 0] = random.integers(112, 125, count)
    for at in _HALVES[kind]:
        scales = random.uniform(0.5e-3, 2e-3, count) * random.choice((-1, 1), count)
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
    return blocks.reshape(n, -1)


def values_of(kind: T, rows: Array) -> Array:
    """The numbers that rows of a GGUF file mean, in single precision."""
    if kind is T.F16:
        return rows.view(np.float16).astype(np.float32)
    return np.asarray(dequantize(rows, kind), np.float32)


def quantized(x: Array, kind: int) -> Array:
    """Activations after their quantization, in float64; the greatest magnitude of a block becomes 127."""
    if kind == FLOATS:
        return x.astype(np.float64)
    blocks = x.astype(np.float32).reshape(len(x), -1, 256 if kind == PER_256 else 32)
    greatest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.float32(127) / np.where(greatest > 0, greatest, np.float32(np.inf))
    quants = np.rint(blocks * inverse)
    rounded: Array = quants.astype(np.float64) * (greatest / np.float32(127))
    whole: Array = rounded.reshape(x.shape)
    return whole


class Products:
    """The C interface, with arrays in place of pointers."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name in ("packed", "panel", "activation", "file_row"):
            getattr(self.library, f"edgespec_{name}_bytes").restype = ctypes.c_size_t
        self.library.edgespec_isa_name.restype = ctypes.c_char_p

    def isas(self) -> list[int]:
        """The instruction sets that can be used here, the least capable first."""
        return [isa for isa in range(16) if self.library.edgespec_isa_usable(isa)]

    def isa(self, name: str) -> int:
        """The number of an instruction set."""
        return int(self.library.edgespec_isa_id(name.encode()))

    def name(self, isa: int) -> str:
        """The name of an instruction set."""
        return str(self.library.edgespec_isa_name(isa).decode())

    def kind(self, kind: T) -> int:
        """Quantization of activations for a type."""
        return int(self.library.edgespec_activation_kind(int(kind)))

    def pack(self, kind: T, rows: Array, k: int, panels: tuple[int, ...] = ()) -> Array:
        """A packed matrix; `panels` are where ranges end that are packed on their own."""
        n = len(rows)
        packed = aligned(self.library.edgespec_packed_bytes(int(kind), i64(k), i64(n)))
        rows = np.ascontiguousarray(rows)
        ends = [*panels, -(-n // PANEL)]
        for start, end in zip([0, *panels], ends, strict=True):
            self.library.edgespec_pack(int(kind), at(rows), i64(k), i64(n), i64(start), i64(end), at(packed))
        return packed

    def row(self, kind: T, packed: Array, k: int, row: int) -> Array:
        """A row of a packed matrix as floats."""
        out = np.empty(k, np.float32)
        self.library.edgespec_unpack_row(int(kind), at(packed), i64(k), i64(row), at(out))
        return out

    def activations(self, isa: int, kind: int, x: Array, ends: tuple[int, ...] = ()) -> Array:
        """Quantized rows; `ends` are where ranges end that are quantized on their own, the last one first."""
        rows, k = x.shape
        made = aligned(self.library.edgespec_activation_bytes(kind, i64(k), i64(rows)), fill=0xA5)
        for start, end in reversed(list(zip([0, *ends], [*ends, rows], strict=True))):
            self.library.edgespec_quantize(
                isa, kind, at(x), i64(x.strides[0] // 4), i64(k), i64(rows), i64(start), i64(end), at(made)
            )
        return made

    def multiply(
        self,
        isa: int,
        kind: T,
        packed: Array,
        activations: Array,
        k: int,
        n: int,
        rows: int,
        *,
        panels: tuple[int, int] | None = None,
        out: Array | None = None,
        out_rows: Array | None = None,
    ) -> Array:
        """Products of all rows with a range of panels, in `out`, or in an array full of NaN."""
        if out is None:
            out = np.full((rows, n), np.nan, np.float32)
        first, end = panels or (0, -(-n // PANEL))
        self.library.edgespec_multiply(
            isa, int(kind), at(packed), i64(k), i64(n), i64(first), i64(end), at(activations), i64(rows),
            at(out), i64(out.strides[0] // 4), None if out_rows is None else at(out_rows),
        )  # fmt: skip
        return out

    def product(self, isa: int, kind: T, packed: Array, x: Array, n: int) -> Array:
        """The product of rows of activations with a packed matrix."""
        activations = self.activations(isa, self.kind(kind), x)
        return self.multiply(isa, kind, packed, activations, x.shape[1], n, len(x))


@cache
def products() -> Products:
    """Those of the library, which is compiled if it is not there."""
    return Products(build())


def aligned(n_bytes: int, fill: int = 0) -> Array:
    """Bytes whose address is a multiple of 64."""
    whole = np.full(n_bytes + 64, fill, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + n_bytes]


def at(array: Array) -> ctypes.c_void_p:
    """The address of an array."""
    return ctypes.c_void_p(array.ctypes.data)


def i64(value: int) -> ctypes.c_int64:
    """A number as C's int64_t."""
    return ctypes.c_int64(value)


_OTHERS = ("plug", "attention", "floats", "vectors", "recurrent", "watch")  # which have no part in products


def sources(machine: str) -> dict[str, tuple[str, ...]]:
    """The library's sources that concern products, with their flags beside the common ones."""
    found = {}
    for line in (SOURCES / "sources.txt").read_text("utf-8").splitlines():
        name, _, flags = line.split("#")[0].partition(" ")
        needs, _set, *rest = flags.split() or ["", ""]
        if needs in ("any", machine) and not name.startswith(_OTHERS):
            found[name] = tuple(rest)
    return found


def compile_sources(compiler: str, files: Mapping[Path, tuple[str, ...]], target: Path, *link: str) -> None:
    """Compile each file with its flags, and link them to `target`."""
    objects = []
    for number, (path, flags) in enumerate(files.items()):
        objects.append(str(target.with_suffix(f".{number}.o")))
        common = ("-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-fno-math-errno", f"-I{SOURCES}")
        subprocess.run([compiler, *common, *flags, "-c", str(path), "-o", objects[-1]], check=True)
    subprocess.run([compiler, *objects, "-o", str(target), *link], check=True)
