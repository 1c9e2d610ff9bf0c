"""Building llama.cpp for this machine's card alone, and a package of it that programs import."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CUDA, VULKAN, PROCESSOR = "cuda", "vulkan", "processor"
_COMMON = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # Some toolchains link parts of C++'s library into llama.cpp's. If these were exported, programs that load
    # the shared one first would crash.
    "-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--exclude-libs,ALL",
    "-DGGML_RPC=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_OPENSSL=OFF",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")),
)
# Flash attention is compiled for the types of keys and values that EdgeSpec has.
_CUDA = ("-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF", "-DGGML_CUDA_FA_QUANTS=f16-f16;q8_0-q8_0")
_CUBLAS, _CUBLAS_LT, _DRIVER = "libcublas.so*", "libcublasLt.so*", "libcuda.so*"
_DRIVER_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib")


class BuildFailed(Exception):
    """llama.cpp cannot be built; the text is the end of what the build said."""


@dataclass(frozen=True)
class Built:
    """A build of llama.cpp.

    Attributes:
        site: a folder whose `llama_cpp` is the package with this build's libraries, for PYTHONPATH.
        seconds: that the build took now; 0 if it was there.
        backend: of the card.
        architecture: that CUDA was compiled for, such as "90".
    """

    site: Path
    seconds: float
    backend: str
    architecture: str


def usual_backend() -> str:
    """What this machine has a card and a compiler for."""
    if shutil.which("nvcc") and cuda_architecture():
        return CUDA
    if shutil.which("glslc") and any(Path("/dev/dri").glob("renderD*")):
        return VULKAN
    return PROCESSOR


def cuda_architecture() -> str:
    """The compute capability of an NVIDIA card here, such as "90"; empty if there is none."""
    return next(iter(_script("backends").cuda_capabilities()), "")


def build(sources: Path, folder: Path, backend: str, architecture: str = "") -> Built:
    """Build llama.cpp with all cores, unless it is there.

    Args:
        architecture: for CUDA; empty for that of the first card.

    Raises:
        BuildFailed: CMake or a compiler fails.
    """
    name = backend
    if backend == CUDA:
        architecture = architecture or cuda_architecture()
        name = f"{backend}-{architecture}"
    place, site = folder / f"build-{name}", folder / f"site-{name}"
    begun = time.perf_counter()
    arguments = [*_COMMON, *_backend_arguments(backend, architecture)]
    fresh = not (place / "bin" / "libllama.so").exists()
    if fresh:
        place.mkdir(parents=True, exist_ok=True)
        _run(["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(place), *arguments], place / "cmake.log")
        _run(["ninja", "-C", str(place), "llama"], place / "ninja.log")
    seconds = time.perf_counter() - begun if fresh else 0.0
    if not (site / "llama_cpp").exists():
        shutil.copytree(sources / "python" / "llama_cpp", site / "llama_cpp")
        (site / "llama_cpp" / "lib").symlink_to(place.resolve() / "bin")
    return Built(site, seconds, backend, architecture)


def _backend_arguments(backend: str, architecture: str) -> list[str]:
    if backend == VULKAN:
        return ["-DGGML_VULKAN=ON"]
    if backend != CUDA:
        return []
    arguments = [*_CUDA, f"-DCMAKE_CUDA_ARCHITECTURES={architecture}-real"]
    if shutil.which("nvcc"):
        arguments.append(f"-DCMAKE_CUDA_COMPILER={shutil.which('nvcc')}")
    libraries = [(_toolkit() / "lib64"), (_toolkit() / "lib"), *_wheels("lib")]
    cublas, lt = _first(libraries, _CUBLAS), _first(libraries, _CUBLAS_LT)
    header = _first([_toolkit() / "include", *_wheels("include")], "cublas_v2.h")
    if cublas and lt:  # a toolkit made of wheels has no name without a version, which CMake looks for
        arguments += [f"-DCUDA_cublas_LIBRARY={cublas}", f"-DCUDA_cublasLt_LIBRARY={lt}"]
    if cudart := _first(libraries, "libcudart.so*"):
        arguments.append(f"-DCUDA_CUDART={cudart}")
    if header:
        arguments.append(f"-DCMAKE_CUDA_FLAGS=-I{header.parent}")
    driver = _first([*(path / "stubs" for path in libraries), *map(Path, _DRIVER_FOLDERS)], _DRIVER)
    if driver:
        arguments.append(f"-DCUDA_cuda_driver_LIBRARY={driver}")
    else:
        arguments.append("-DGGML_CUDA_NO_VMM=ON")  # nothing else calls the driver itself
    return arguments


def _fixes() -> dict[str, str]:
    """What scripts/setup.py gives a compiler on some processors."""
    return {"CXXFLAGS": _script("build_fixes").with_fixes(os.environ).get("CXXFLAGS", "")}


def _script(name: str) -> Any:
    """A module of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, _SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _toolkit() -> Path:
    """The folder of CUDA's toolkit: what nvcc says, as the program may be a script that calls it."""
    nvcc = shutil.which("nvcc") or "nvcc"
    said = subprocess.run(
        [nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False
    ).stderr
    tops = [line.partition("TOP=")[2].strip() for line in said.splitlines() if "TOP=" in line]
    return Path(tops[0]) if tops else Path("/usr/local/cuda")


def _wheels(kind: str) -> list[Path]:
    """Folders of libraries or headers in NVIDIA's wheels."""
    places = {Path(path) for path in [*sys.path, sysconfig.get_path("purelib")] if path.endswith("packages")}
    return [found for place in sorted(places) for found in place.glob(f"nvidia/*/{kind}")]


def _first(folders: list[Path], pattern: str) -> Path | None:
    return next((found for folder in folders for found in sorted(folder.glob(pattern))), None)


def _run(command: list[str], log: Path) -> None:
    with log.open("w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, check=False, env={**os.environ, **_fixes()}
        )
    if done.returncode:
        said = log.read_text("utf-8", "replace").splitlines()
        failures = [line for line in said if "error" in line.lower() or "FAILED" in line]
        raise BuildFailed("\n".join([*failures[:20], *said[-20:], f"(all of it is in {log})"]))
