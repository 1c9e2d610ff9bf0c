"""llama.cpp's sources: found, unpacked, and packed into a small archive for a machine without a network."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

PACKAGE = "llama-cpp-python"
ARCHIVE = "llama-sources.tar.xz"
_PREFIX = "vendor/llama.cpp/"
_COMPILED = ("ggml/", "src/", "include/", "cmake/", "licenses/", "CMakeLists.txt", "LICENSE")
# Backends that are not built here; llama.cpp's CMake files enter their folders only when asked to.
_LEFT_OUT = (
    "cann",
    "et",
    "hexagon",
    "metal",
    "musa",
    "opencl",
    "openvino",
    "sycl",
    "webgpu",
    "zdnn",
    "zendnn",
)
_VENDOR = "vendor/"  # for parts that are not built, but CMake wants to see these


class NoSources(Exception):
    """The sources are not there; the text says what to do."""


def find_sources(named: Path | None, folder: Path) -> Path:
    """The folder of llama.cpp's sources, with the Python files of its package in `python/llama_cpp`.

    Args:
        named: an archive that `pack` made, or a source distribution of llama-cpp-python; None for one in
            `folder`, or else what pip finds in its cache or on the network.
        folder: where they are unpacked.

    Raises:
        NoSources: there are none.
    """
    unpacked = folder / "sources"
    if (unpacked / "CMakeLists.txt").is_file():
        return unpacked
    archive = named or next(iter([*folder.glob(ARCHIVE), *folder.glob("llama_cpp_python-*.tar.gz")]), None)
    if archive is None:
        archive = _from_pip(folder)
    if not archive.is_file():
        raise NoSources(f"There is no file {archive}.")
    with tarfile.open(archive) as tar:
        members = []
        for member in tar:
            place = _place(member.name)
            if place is not None and (member.isfile() or member.isdir()):
                member.name = place
                members.append(member)
        tar.extractall(unpacked, members, filter="data")
    if not (unpacked / "CMakeLists.txt").is_file():
        raise NoSources(f"{archive} has no sources of llama.cpp.")
    return unpacked


def pack(sources: Path, archive: Path) -> Path:
    """Pack what `find_sources` has unpacked; a few megabytes."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(sources, "sources")
    return archive


def _place(name: str) -> str | None:
    """The place of an archive's file below the folder of sources; None if it is not compiled."""
    top, _, inner = name.partition("/")
    if top == "sources":
        return inner or None
    if inner.startswith("llama_cpp/") and "/lib/" not in inner:
        return f"python/{inner}"
    if not inner.startswith(_PREFIX):
        return None
    inner = inner.removeprefix(_PREFIX)
    if inner.startswith(_VENDOR):
        wanted = inner.startswith("vendor/hash/") or PurePosixPath(inner).name == "CMakeLists.txt"
        return inner if wanted else None
    left_out = any(inner.startswith(f"ggml/src/ggml-{backend}/") for backend in _LEFT_OUT)
    return inner if inner.startswith(_COMPILED) and not left_out else None


def _from_pip(folder: Path) -> Path:
    version = importlib.metadata.version(PACKAGE)
    command = [
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        PACKAGE,
        "-d",
        str(folder),
        f"{PACKAGE}=={version}",
    ]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    found = next(iter(folder.glob("llama_cpp_python-*.tar.gz")), None)
    if done.returncode or found is None:
        raise NoSources(
            "The sources of llama.cpp are not here. Get them where there is a network "
            f"(pip {' '.join(command[1:])}), and name them with --sources."
        )
    return found
