"""Kernels of instruction sets that this processor lacks, emulated: the bits of AVX2."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from edgespec.kernels.native.build import SOURCES
from tests.unit.native_products import (
    PANEL,
    TYPES,
    Array,
    Products,
    block_values,
    compile_sources,
    products,
    random_blocks,
    sources,
)

pytestmark = pytest.mark.slow  # a library is compiled

_ROWS = (1, 4, 5, 15, 16, 17, 32, 33, 49, 127, 130)
_FILLS = (None, 0x00, 0x7F, 0x80, 0xFF)
_ARM_COMPILER, _ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_COMPILER = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


@pytest.fixture(scope="module")
def with_tiles(tmp_path_factory: pytest.TempPathFactory) -> Products:
    """The library with AMX's instructions written out in C++."""
    if _COMPILER is None or "avx512-vnni" not in map(products().name, products().isas()):
        pytest.skip("the rest of the AMX kernels needs a compiler and AVX512")
    files = {SOURCES / name: flags for name, flags in sources("x86_64").items()}
    tiles = SOURCES / "amx.cpp"
    files[tiles] = (
        *(flag for flag in files[tiles] if not flag.startswith("-mamx")),
        "-DEDGESPEC_EMULATED_TILES",
    )
    library = tmp_path_factory.mktemp("tiles") / "products.so"
    compile_sources(_COMPILER, files, library, "-shared")
    return Products(library)


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program for ARM which takes products from files."""
    if not products().isas():
        pytest.skip("there is nothing to compare with")
    if not (shutil.which(_ARM_COMPILER) and shutil.which(_ARM_EMULATOR)):
        pytest.skip(f"{_ARM_COMPILER} or {_ARM_EMULATOR} is not installed")
    files = {SOURCES / name: flags for name, flags in sources("aarch64").items()}
    files[Path(__file__).parents[1] / "native" / "multiply.cpp"] = ()
    program = tmp_path_factory.mktemp("arm") / "multiply"
    compile_sources(_ARM_COMPILER, files, program, "-static")
    return program


def _length(kind: T) -> int:
    """Values of a row; where blocks have 32, an odd number of them."""
    return {1: 77, 32: 352, 256: 768}[block_values(kind)]


def _activations(count: int, k: int, fill: int | None, random: np.random.Generator) -> Array:
    if fill is None:
        return random.normal(size=(count, k)).astype(np.float32)
    signs = np.where(np.arange(count) % 2, -1, 1).astype(np.float32)
    return np.repeat(signs[:, None], k, 1)


@pytest.mark.parametrize("fill", _FILLS)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_tiles_give_the_same_bits(with_tiles: Products, kind: T, fill: int | None) -> None:
    random = np.random.default_rng(1)
    k, n = _length(kind), 2 * PANEL - 3
    packed = with_tiles.pack(kind, random_blocks(kind, n, k, random, fill), k)
    x = _activations(max(_ROWS), k, fill, random)
    expected = with_tiles.product(with_tiles.isa("avx2"), kind, packed, x, n)
    for count in _ROWS:
        out = with_tiles.product(with_tiles.isa("amx"), kind, packed, x[-count:], n)
        assert np.array_equal(out.view(np.uint32), expected[-count:].view(np.uint32)), count


@pytest.mark.parametrize("isa", ["neon-dotprod", "neon-i8mm"])
def test_arm_gives_the_same_bits(arm_program: Path, tmp_path: Path, isa: str) -> None:
    random = np.random.default_rng(2)
    arguments: list[str] = []
    expected: dict[Path, tuple[T, int | None, int, Array]] = {}
    for kind in TYPES:
        for fill in _FILLS:
            k, n = _length(kind), PANEL + 5
            rows = random_blocks(kind, n, k, random, fill)
            packed = products().pack(kind, rows, k)
            for count in (1, 2, 5, 67):
                job = tmp_path / f"{kind.name}-{fill}-{count}"
                x = _activations(count, k, fill, random)
                files = [job.with_suffix(suffix) for suffix in (".weights", ".activations", ".results")]
                files[0].write_bytes(rows.tobytes())
                files[1].write_bytes(x.tobytes())
                numbers = (products().isa(isa), int(kind), k, n, count)
                arguments += [*map(str, numbers), *map(str, files)]
                wanted = products().product(products().isas()[0], kind, packed, x, n)
                expected[files[2]] = (kind, fill, count, wanted)
    subprocess.run([_ARM_EMULATOR, "-cpu", "max", str(arm_program), *arguments], check=True)
    for path, (kind, fill, count, wanted) in expected.items():
        out = np.frombuffer(path.read_bytes(), np.float32).reshape(wanted.shape)
        assert np.array_equal(out.view(np.uint32), wanted.view(np.uint32)), (kind.name, fill, count)
