"""The fixes of llama.cpp's build, with this machine's compiler."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SOURCE = """
#include <immintrin.h>
#include <cstdint>
#include <cstdio>
struct tile_config_t {  // as in ggml-cpu/amx/mmq.cpp
    uint8_t palette_id = 0;
    uint8_t start_row = 0;
    uint8_t reserved_0[14] = {0};
    uint16_t colsb[16] = {0};
    uint8_t rows[16] = {0};
};
extern "C" { unsigned char loaded[64]; void configure(); }
static inline void init() {
    alignas(64) tile_config_t tc = {};
    tc.palette_id = 1;
    for (int i = 0; i < 8; i++) {
        tc.rows[i] = i < 2 ? 8 : 16;
        tc.colsb[i] = i == 2 || i == 3 ? 32 : 64;
    }
    _tile_loadconfig(&tc);
}
void configure() { init(); }
__attribute__((noinline)) void use_stack() {
    volatile unsigned char waste[1024];
    for (int i = 0; i < 1024; i++) waste[i] = 0xa5;
}
int main() {
    use_stack();
    configure();
    for (unsigned char byte : loaded) printf("%d ", byte);
}
"""
ROWS = bytes([8, 8, *[16] * 6, *[0] * 8])
WIDTHS = [64, 64, 32, 32, 64, 64, 64, 64]
EXPECTED = bytes([1, *[0] * 15]) + b"".join(n.to_bytes(2, "little") for n in WIDTHS) + bytes(16) + ROWS


@pytest.fixture(scope="module")
def build_fixes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_fixes", SCRIPTS / "build_fixes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory, build_fixes: ModuleType) -> str:
    """A C++ compiler that can compile for matrix units."""
    program = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not build_fixes.applies() or program is None:
        pytest.skip("no C++ compiler for x86-64 Linux")
    source = tmp_path_factory.mktemp("probe") / "empty.cpp"
    source.write_text("#include <immintrin.h>\nvoid f() { _tile_release(); }\n")
    done = subprocess.run([program, "-mamx-tile", "-c", source, "-o", source.with_suffix(".o")], check=False)
    if done.returncode != 0:
        pytest.skip("the compiler knows no matrix units")
    return program


def read_by_ldtilecfg(compiler: str, folder: Path, options: list[str]) -> bytes:
    """The 64 bytes that the instruction would read, found by a program that copies them in its stead."""
    source, assembly, program = folder / "shape.cpp", folder / "shape.s", folder / "shape"
    source.write_text(SOURCE)
    subprocess.run(
        [compiler, "-O3", "-fPIC", "-mamx-tile", *options, "-S", source, "-o", assembly], check=True
    )
    lines = []
    for line in assembly.read_text().splitlines():
        name, _, operand = line.strip().partition("ldtilecfg")
        if name or not operand:
            lines.append(line)
            continue
        lines.append("\tmovq loaded@GOTPCREL(%rip), %r10")
        for at in range(0, 64, 8):
            lines += [f"\tmovq {at}+{operand.strip()}, %r11", f"\tmovq %r11, {at}(%r10)"]
    assembly.write_text("\n".join(lines) + "\n")
    subprocess.run([compiler, assembly, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    return bytes(map(int, done.stdout.split()))


def test_all_of_the_configuration_is_stored(compiler: str, tmp_path: Path, build_fixes: ModuleType) -> None:
    options = shlex.split(build_fixes.with_fixes({})["CXXFLAGS"])
    assert read_by_ldtilecfg(compiler, tmp_path, options) == EXPECTED


def test_the_test_sees_stores_that_are_missing(compiler: str, tmp_path: Path) -> None:
    header = tmp_path / "faulty.h"  # what GCC 12.2 says of the instruction
    header.write_text(
        "#include <immintrin.h>\n#undef _tile_loadconfig\n#define _tile_loadconfig(config) "
        '__asm__ volatile("ldtilecfg %0" :: "m"(*(const long long*)(config)))\n'
    )
    if "clang" in subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("Clang keeps stores that GCC drops")
    assert read_by_ldtilecfg(compiler, tmp_path, ["-include", str(header)]) != EXPECTED


def test_builds_for_such_a_processor_and_for_others(
    compiler: str, tmp_path: Path, build_fixes: ModuleType
) -> None:
    source = tmp_path / "any.cpp"
    source.write_text(
        "#ifdef __AVX512FP16__\n#error ggml would add in half precision\n#endif\nint main() {}\n"
    )
    options = shlex.split(build_fixes.with_fixes({})["CXXFLAGS"])
    for target in ["-march=x86-64", "-mamx-tile", "-march=sapphirerapids"]:
        subprocess.run(
            [compiler, target, "-Wall", "-Werror", *options, "-c", source, "-o", tmp_path / "any.o"],
            check=True,
        )


@pytest.mark.skipif(sys.platform != "linux", reason="the fixes are for Linux")
@pytest.mark.parametrize(
    ("variables", "flags", "arguments"),
    [
        ({}, "{}", ""),
        ({"CXXFLAGS": "-O2 -g"}, "-O2 -g {}", ""),
        ({"CMAKE_ARGS": "-DGGML_CUDA=on"}, "{}", "-DGGML_CUDA=on"),
        (
            {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-O2"},
            "{}",
            "-DGGML_NATIVE=ON '-DCMAKE_CXX_FLAGS=-O2 {}'",
        ),
        ({"CMAKE_ARGS": "-D CMAKE_CXX_FLAGS:STRING=-O1"}, "{}", "-D 'CMAKE_CXX_FLAGS:STRING=-O1 {}'"),
    ],
)
def test_options_of_ones_own_are_kept(
    variables: dict[str, str],
    flags: str,
    arguments: str,
    build_fixes: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_fixes, "applies", lambda: True)
    option = f"-include {shlex.quote(str(build_fixes.HEADER))}"
    found = build_fixes.with_fixes(variables)
    assert found["CXXFLAGS"] == flags.format(option)
    assert shlex.split(found["CMAKE_ARGS"]) == shlex.split(arguments.format(option))


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("flags\t\t: fpu amx_tile amx_int8 avx2", True),
        ("flags\t\t: fpu avx512f avx512_fp16", True),
        ("flags\t\t: fpu avx2", False),
        ("", False),
    ],
)
def test_they_are_needed_by_the_processors_concerned(
    line: str, needed: bool, build_fixes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name\t: some processor\n{line}\n")
    monkeypatch.setattr(build_fixes, "applies", lambda: True)
    assert build_fixes.are_needed(file) is needed
    assert not build_fixes.are_needed(tmp_path / "missing")
    monkeypatch.setattr(build_fixes, "applies", lambda: False)
    assert not build_fixes.are_needed(file)
