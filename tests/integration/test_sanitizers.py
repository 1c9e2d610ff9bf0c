"""Every operation of the kernels under sanitizers: memory, undefined behaviour, and races between threads.

tests/native/operations.cpp computes them as ggml would. It is compiled with the kernels' own sources for the
instruction sets of this processor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec.kernels.native.build import SOURCES, sources
from tests.unit.native_products import products

_PROGRAM = Path(__file__).parents[1] / "native" / "operations.cpp"
_COMPILER = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
_COMMON = ("-std=c++17", "-O1", "-g", "-fPIC", "-ffp-contract=off", "-fno-math-errno", f"-I{SOURCES}")
_NO_PROCESSOR = 77  # the program's status where no instruction set can be used

pytestmark = [
    pytest.mark.slow,  # a minute or two of compiling
    pytest.mark.skipif(_COMPILER is None, reason="there is no C++ compiler"),
]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        list(map(str, command)), env={**os.environ, **options}, capture_output=True, text=True, check=False
    )


def compiled(sanitizers: str, folder: Path) -> Path:
    """The program. Its parts are a shared library, as the plug looks for ggml in one."""
    assert _COMPILER is not None
    checked = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    main = folder / "main.cpp"
    main.write_text("int operations(); int main() { return operations(); }\n", "utf-8")
    if run(_COMPILER, *checked, "-shared", "-fPIC", main, "-o", folder / "tried.so").returncode:
        pytest.skip(f"{_COMPILER} has no sanitizers for {sanitizers}")
    here = frozenset(products().name(isa) for isa in products().isas())
    files = [(SOURCES / source.name, source.flags) for source in sources(here)] + [(_PROGRAM, ())]
    objects = []
    for path, flags in files:
        objects.append(folder / f"{path.stem}.o")
        done = run(_COMPILER, *_COMMON, *checked, *flags, "-c", path, "-o", objects[-1])
        assert done.returncode == 0, done.stderr
    library, program = folder / "liboperations.so", folder / "operations"
    for command in (
        (*objects, "-shared", "-o", library, "-ldl", "-pthread"),
        (main, library, f"-Wl,-rpath,{folder}", "-o", program, "-pthread"),
    ):
        done = run(_COMPILER, *checked, *command)
        assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_no_operation_is_at_fault(sanitizers: str, tmp_path: Path) -> None:
    program = compiled(sanitizers, tmp_path)
    # Some versions of the thread sanitizer find no room for their memory where addresses are random.
    fixed = ["setarch", "--addr-no-randomize"] if shutil.which("setarch") else []
    done = run(*fixed, program)
    if done.returncode == _NO_PROCESSOR:
        pytest.skip("the processor has none of the instruction sets")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitizer does not work on this system")
    assert (done.returncode, done.stdout) == (0, "every operation was computed\n"), done.stderr
