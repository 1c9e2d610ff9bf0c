"""What scripts/wheel.py writes and refuses; nothing is downloaded or compiled."""

from __future__ import annotations

import ctypes
import io
import math
import platform
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from edgespec.version import __version__
from tests.scripts import loaded_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "wheel.py"
PROJECT = ROOT / "wheels" / "edgespec_llama"

METADATA = (
    b"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.36\nSummary: Bindings\nLicense: MIT\n"
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with loaded_script("wheel") as module:
        yield module


@pytest.fixture
def distribution(tmp_path: Path) -> Path:
    """The beginnings of a source distribution of llama-cpp-python."""
    folder = tmp_path / "llama_cpp_python-0.3.36"
    llama_cpp = folder / "vendor" / "llama.cpp"
    for part in ("cmake", "ggml", "include", "licenses", "src", "tools/mtmd", "vendor"):
        (llama_cpp / part).mkdir(parents=True)
        (llama_cpp / part / "file").write_text(part)
    (llama_cpp / "LICENSE").write_text("MIT, of llama.cpp")
    (llama_cpp / "CMakeLists.txt").write_text("project(llama.cpp)")
    (folder / "llama_cpp" / "server").mkdir(parents=True)
    (folder / "llama_cpp" / "__init__.py").write_text('__version__ = "0.3.36"\n')
    (folder / "llama_cpp" / "server" / "app.py").write_text("import fastapi\n")
    (folder / "llama_cpp" / "py.typed").touch()
    (folder / "PKG-INFO").write_bytes(METADATA + b"Requires-Dist: numpy>=1.20.0\n\nThe description.\n")
    (folder / "LICENSE.md").write_text("MIT, of llama-cpp-python")
    return folder


def test_the_bindings_are_installed_by_pip_and_ask_for_the_libraries(
    script: ModuleType, distribution: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pip")
    wheel = script.bindings_wheel(distribution, tmp_path)
    into = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--quiet", "--target", str(into)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    assert (into / "llama_cpp" / "server" / "app.py").read_text() == "import fastapi\n"
    [info] = into.glob("*.dist-info")
    metadata = (info / "METADATA").read_text().splitlines()
    assert "Version: 0.3.36+edgespec" in metadata
    assert {"Requires-Dist: numpy>=1.20.0", f"Requires-Dist: edgespec-llama=={__version__}"} <= set(metadata)
    assert (info / "licenses" / "LICENSE.md").read_text() == "MIT, of llama-cpp-python"


def test_the_same_files_give_the_same_bytes(script: ModuleType, tmp_path: Path) -> None:
    files = {"b/two.py": b"2", "a-1.dist-info/WHEEL": b"Wheel-Version: 1.0\n", "a/one.py": b"1"}
    first = script.write_wheel(tmp_path, "a-1-py3-none-any.whl", files).read_bytes()
    stale = {"a-1.dist-info/RECORD": b"of other files", "a/": b"", **dict(reversed(files.items()))}
    assert script.write_wheel(tmp_path, "a-1-py3-none-any.whl", stale).read_bytes() == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert archive.namelist() == ["a/one.py", "b/two.py", "a-1.dist-info/RECORD", "a-1.dist-info/WHEEL"]
        assert b"a/one.py,sha256=" in archive.read("a-1.dist-info/RECORD")


def test_a_wheel_that_was_compiled_elsewhere_has_the_tag_of_its_platform(
    script: ModuleType, tmp_path: Path
) -> None:
    files = {"a/one.dll": b"1", "a-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n"}
    compiled = script.write_wheel(tmp_path, "a-1-py3-none-linux_x86_64.whl", files)
    name, renamed = script.for_platform(compiled, script.WINDOWS)
    assert name == "a-1-py3-none-win_amd64.whl"
    assert renamed["a-1.dist-info/WHEEL"].endswith(b"\nTag: py3-none-win_amd64\n")


def test_what_is_compiled_is_put_together_and_kept_if_it_has_not_changed(
    script: ModuleType, distribution: Path, tmp_path: Path
) -> None:
    into = tmp_path / "sources"
    script.put_together(distribution, into)
    assert (into / "llama.cpp" / "src" / "file").read_text() == "src"
    assert (into / "llama.cpp" / "tools" / "mtmd" / "file").exists()
    assert (into / "LICENSE-llama.cpp").read_text() == "MIT, of llama.cpp"
    assert (into / "edgespec" / "kernels" / "native" / "build.py").exists()
    assert not [*into.rglob("*.so"), *into.rglob("__pycache__")]
    before = {path: path.stat().st_mtime_ns for path in into.rglob("*") if path.is_file()}
    (distribution / "vendor" / "llama.cpp" / "src" / "file").write_text("changed")
    script.put_together(distribution, into)
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert changed == [into / "llama.cpp" / "src" / "file"]


def test_other_sources_than_the_pinned_ones_are_refused(script: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    with tarfile.open(other, "w:gz"):
        pass
    with pytest.raises(script.WheelError, match="is not the pinned source distribution of llama-cpp-python"):
        script.unpacked(other, tmp_path)


def test_the_wheel_is_of_this_version_and_the_pinned_bindings(script: ModuleType) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == __version__ == script.own_version()
    package = (PROJECT / "edgespec_llama" / "__init__.py").read_text("utf-8")
    pins = script.read_pins(ROOT / "constraints.txt")
    assert f'LLAMA_CPP_PYTHON = "{pins["llama-cpp-python"]}"' in package


def test_every_tool_is_pinned(script: ModuleType) -> None:
    lines = script.TOOLS.read_text("utf-8").splitlines()
    unpinned = [line for line in lines if not re.match(r"#|[\w-]+==[\w.]+( ;|$)", line)]
    assert unpinned == []


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64" or shutil.which("cc") is None,
    reason="without glibc there is nothing to compare with, or no compiler",
)
def test_sines_for_windows_have_the_bits_of_glibc(tmp_path: Path) -> None:
    library = tmp_path / "trigonometry.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-fno-builtin", str(PROJECT / "trigonometry.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    own, system = ctypes.CDLL(str(library)), ctypes.CDLL("libm.so.6")
    rng = random.Random(0)
    angles = [0.0, *(rng.choice([-1, 1]) * 10 ** rng.uniform(-6, 8) for _ in range(5000))]
    for name in ("sinf", "cosf"):
        ours, theirs = getattr(own, name), getattr(system, name)
        for function in (ours, theirs):
            function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
        assert [ours(angle) for angle in angles] == [theirs(angle) for angle in angles]
        assert math.isnan(ours(math.inf))
