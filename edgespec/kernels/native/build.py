"""Compile EdgeSpec's own kernels: python -m edgespec.kernels.native.build

The library lies beside the sources, or in the user's cache folder where that cannot be written to. Its name
holds a hash of the sources, so a library of other sources is never loaded. scripts/setup.py runs this; in an
environment made without it, the first model that is loaded does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

SOURCES = Path(__file__).parent
COMMAND = "python -m edgespec.kernels.native.build"

_MANIFEST = "sources.txt"
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra")
_LINK = ("-shared", "-pthread")
_COMPILERS = ("c++", "g++", "clang++")
_MACHINES = {"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"}
_UNKNOWN_FLAG = (
    "unrecognized",
    "unknown argument",
    "unsupported option",
    "invalid feature",
    "unknown feature",
)


class BuildFailed(Exception):
    """The library cannot be compiled; the text says why."""


@dataclass(frozen=True)
class SourceFile:
    """One file to compile.

    Attributes:
        flags: beside those that all files have.
    """

    name: str
    flags: tuple[str, ...]


def library_path() -> Path | None:
    """The library that was compiled of these sources; None if there is none."""
    name = _library_name()
    return next((path for folder in _folders() if (path := folder / name).is_file()), None)


@cache
def sources_digest() -> str:
    """A hash of everything that the library is made of, but for the compiler."""
    digest = hashlib.blake2b(" ".join((*_COMMON, *_LINK, _machine())).encode(), digest_size=8)
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h") or path.name == _MANIFEST:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def build(*, again: bool = False) -> Path:
    """Compile the library, unless it is there.

    Args:
        again: compile it even then.

    Returns:
        Where it is.

    Raises:
        BuildFailed: there is no compiler, it fails, or the library cannot be written.
    """
    if not again and (known := library_path()) is not None:
        return known
    if sys.platform == "win32":
        raise BuildFailed("the plug is made for Linux and macOS")
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="edgespec-kernels-") as scratch:
        made = _compile(compiler, Path(scratch))
        return _install(made)


def build_once() -> str:
    """Compile the library, unless it exists or a build of these sources has failed on this machine before.

    Returns:
        Why there is no library; empty if there is one.
    """
    if library_path() is not None:
        return ""
    failed = user_cache_path("edgespec") / "native" / f"{sources_digest()}.failed"
    try:
        if problem := failed.read_text("utf-8"):
            return problem
    except (OSError, ValueError):
        pass
    try:
        build()
    except BuildFailed as error:
        with suppress(OSError):  # the build is tried again next time
            failed.parent.mkdir(parents=True, exist_ok=True)
            failed.write_text(str(error), "utf-8")
        return str(error)
    return ""


def main() -> int:
    """Compile, and print where the library is; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--again", action="store_true", help="compile the library even if it is there")
    try:
        print(build(again=parser.parse_args().again))
    except BuildFailed as error:
        print(f"EdgeSpec's own kernels cannot be compiled: {error}", file=sys.stderr)
        return 1
    return 0


def _compile(compiler: Sequence[str], scratch: Path) -> Path:
    def compiled(source: SourceFile) -> Path | None:
        target = scratch / f"{source.name}.o"
        done = _run([*compiler, *_COMMON, *source.flags, "-c", str(SOURCES / source.name), "-o", str(target)])
        if done.returncode == 0:
            return target
        if source.flags and any(words in done.stderr for words in _UNKNOWN_FLAG):
            return None  # an older compiler: the library lacks this instruction set
        raise BuildFailed(f"{compiler[0]} fails at {source.name}:\n{done.stderr.strip()}")

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = [str(path) for path in pool.map(compiled, sources()) if path is not None]
    library = scratch / _library_name()
    done = _run([*compiler, *_LINK, *objects, "-o", str(library), *_libraries()])
    if done.returncode:
        raise BuildFailed(f"{compiler[0]} fails to link:\n{done.stderr.strip()}")
    return library


def _install(library: Path) -> Path:
    """Move a library to the first folder that can be written to, in place of those of other sources."""
    refused: OSError | None = None
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{library.name}.{os.getpid()}.partial"
            shutil.copy(library, partial)
            partial.replace(folder / library.name)
        except OSError as error:
            refused = error
            continue
        for old in folder.glob(f"edgespec-kernels-*{library.suffix}"):
            if old.name != library.name:
                with suppress(OSError):
                    old.unlink()
        return folder / library.name
    raise BuildFailed(f"the library cannot be written: {refused}")


def sources() -> list[SourceFile]:
    """Return the files to compile for this machine."""
    found = []
    for line in (SOURCES / _MANIFEST).read_text("utf-8").splitlines():
        fields = line.split("#")[0].split()
        if fields and fields[1] in ("any", _machine()):
            found.append(SourceFile(fields[0], tuple(fields[2:])))
    return found


def _compiler() -> list[str]:
    """The command of the C++ compiler.

    Raises:
        BuildFailed: there is none.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildFailed("there is no C++ compiler; install one, or name it in CXX")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from error


def _machine() -> str:
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


def _libraries() -> tuple[str, ...]:
    return ("-ldl",) if sys.platform == "linux" else ()


def _library_name() -> str:
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return f"edgespec-kernels-{sources_digest()}{suffix}"


def _folders() -> tuple[Path, ...]:
    """Return the folders that may hold a library, the preferred one first."""
    return SOURCES / "compiled", user_cache_path("edgespec") / "native"


if __name__ == "__main__":
    sys.exit(main())
