"""Compile EdgeSpec's own kernels: python -m edgespec.kernels.native.build

The library lies beside the sources, or in the user's cache folder where that cannot be written to. Its name
holds a hash of the sources, so a library of other sources is never loaded, and the instruction sets that it
was compiled for, if not all of the sources' are: those of this processor. On another processor, such as when
a folder is shared, those that it lacks are added. scripts/setup.py runs this; in an environment made without
it, the first model that is loaded does.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgespec.base.installation import module_command
from edgespec.base.prebuilt import installed_wheel
from edgespec.processes.children import find_program, run

SOURCES = Path(__file__).parent
COMMAND = module_command("edgespec.kernels.native.build")

_MANIFEST = "sources.txt"
_GATE = "processor.cpp"  # knows which instruction sets the processor has
_ANY = "any"
_UNUSED_S = 90 * 24 * 3600.0  # after which another version's library is removed from the cache folder
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra")
_LINK = ("-shared", "-pthread")
# GCC aligns Windows' stack to 16 bytes, and would move vectors on it as if it were aligned to their size.
_SYSTEM_FLAGS = {"win32": ("-Wa,-muse-unaligned-vector-move",)}
_SUFFIXES = {"darwin": ".dylib", "win32": ".dll"}
_LIBRARIES = {"linux": ("-ldl",)}
_MISSING = (
    "Install a C++ compiler (on Debian and Ubuntu: sudo apt install build-essential) or name one in CXX. The "
    f"next start compiles them; so does: {COMMAND}"
)
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
    """The library cannot be compiled; the text says why.

    Attributes:
        remedy: what to do about it; empty if nothing can be done on this machine.
    """

    def __init__(self, what: str, remedy: str = f"To compile them: {COMMAND}") -> None:
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True)
class SourceFile:
    """One file to compile."""

    name: str
    instruction_set: str  # that the file is for; "any" if it is for all
    flags: tuple[str, ...]  # beside those that all files have


def library_path() -> Path | None:
    """The library that was compiled of these sources, here or for a wheel; None if there is none.

    Of several, it is the one for most instruction sets.
    """
    wheel = installed_wheel()
    folders = [*_folders(), *([wheel.folder] if wheel is not None else [])]
    pattern = f"edgespec-kernels-{sources_digest()}*{_suffix()}"
    found = [path for folder in folders for path in sorted(folder.glob(pattern))]
    return max(found, key=lambda path: len(compiled_sets(path)), default=None)


def compiled_sets(library: Path) -> frozenset[str]:
    """The instruction sets that a library of these sources was compiled for, by its name.

    It lacks those among them that the compiler did not know.
    """
    named = library.name.removeprefix(f"edgespec-kernels-{sources_digest()}").removesuffix(_suffix())
    return frozenset(named.removeprefix("-").split("+")) - {_ANY} if named else instruction_sets()


def reports_folder() -> Path:
    """Return the folder of what trials of the library found: beside it, if it was compiled here."""
    *_, in_cache = folders = list(_folders())
    library = library_path()
    beside = library is not None and library.parent in folders and os.access(library.parent, os.W_OK)
    return library.parent if library is not None and beside else in_cache


def needs_build() -> bool:
    """True if there is no library, or this processor has instruction sets that it was not compiled for."""
    path = library_path()
    if path is None:
        return True
    compiled = compiled_sets(path)
    return compiled != instruction_sets() and not _runnable(path) <= compiled


@cache
def sources_digest() -> str:
    """A hash of everything that the library is made of, except for the compiler."""
    digest = hashlib.blake2b(" ".join((*_COMMON, *_LINK, _machine())).encode(), digest_size=8)
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h") or path.name == _MANIFEST:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def build_into(folder: Path, system: str = sys.platform) -> Path:
    """Compile the library for all processors of this architecture into a folder, for others to install.

    The same sources and compiler give the same bytes.

    Args:
        system: that the compiler compiles for.

    Raises:
        BuildFailed: there is no compiler, it fails, or it does not know all instruction sets.
        OSError: the folder cannot be written to.
    """
    with tempfile.TemporaryDirectory(prefix="edgespec-kernels-") as scratch:
        made = _compile(_compiler(), Path(scratch), instruction_sets(), system, complete=True)
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, folder))


def build(*, again: bool = False) -> Path:
    """Compile the library, unless it is there.

    Args:
        again: compile it even then.

    Returns:
        Where it is.

    Raises:
        BuildFailed: there is no compiler, it fails, or the library cannot be written.
    """
    known = library_path()
    if known is not None and not again and not needs_build():
        return known
    if sys.platform == "win32":
        raise BuildFailed("on Windows they come with EdgeSpec's wheels alone", "")
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="edgespec-kernels-") as scratch:
        wanted = _of_processor(compiler, Path(scratch))
        if known is not None:
            wanted |= compiled_sets(known)  # for the other processors that use this folder
        made = _compile(compiler, Path(scratch), wanted)
        return _install(made)


_failure: BuildFailed | None = None  # of this process


def build_once() -> None:
    """Compile the library, unless it is there or that failed in this process."""
    global _failure
    if _failure is None and needs_build():
        try:
            build()
        except BuildFailed as error:
            _failure = error


def known_failure() -> BuildFailed | None:
    """Why `build_once` could not compile the library; None if there is one."""
    return _failure if library_path() is None else None


def main() -> int:
    """Compile, and print where the library is; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--again", action="store_true", help="compile the library even if it is there")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="compile one for all processors of this architecture there",
    )
    parser.add_argument("--system", default=sys.platform, help="that the compiler compiles for: win32")
    parser.add_argument("--background", action="store_true", help="leave the processor to other programs")
    arguments = parser.parse_args()
    if arguments.background and sys.platform != "win32":
        os.nice(10)
    try:
        if arguments.into:
            print(build_into(arguments.into, arguments.system))
        else:
            print(build(again=arguments.again))
    except (BuildFailed, OSError) as error:
        print(f"EdgeSpec's own kernels cannot be compiled: {error}", file=sys.stderr)
        return 1
    return 0


def _of_processor(compiler: Sequence[str], scratch: Path) -> frozenset[str]:
    """The instruction sets that this processor has, as the sources' own gate sees it."""
    sets = instruction_sets()
    if not sets:
        return sets
    gate = scratch / f"processor{_suffix()}"
    done = _run([*compiler, *_COMMON, *_LINK, str(SOURCES / _GATE), "-o", str(gate)])
    if done.returncode:
        raise _failed(f"{compiler[0]} fails at {_GATE}", done)
    return _runnable(gate)


def _runnable(library: Path) -> frozenset[str]:
    """The instruction sets of the sources that this processor has.

    Args:
        library: holds the gate. Where it cannot be loaded, as one that was made for another machine cannot,
            all are returned.
    """
    sets = instruction_sets()
    if not sets:
        return sets
    try:
        gate = ctypes.CDLL(str(library))
        return frozenset(s for s in sets if gate.edgespec_processor_has(gate.edgespec_isa_id(s.encode())))
    except (OSError, AttributeError):
        return sets


def _compile(
    compiler: Sequence[str],
    scratch: Path,
    wanted: frozenset[str],
    system: str = sys.platform,
    *,
    complete: bool = False,
) -> Path:
    """Compile for some instruction sets, in a scratch folder.

    Args:
        system: that the compiler compiles for.
        complete: fail rather than leave out one of them.
    """

    def compiled(source: SourceFile) -> Path | None:
        target = scratch / f"{source.name}.o"
        flags = (*_COMMON, *_SYSTEM_FLAGS.get(system, ()), *source.flags)
        done = _run([*compiler, *flags, "-c", str(SOURCES / source.name), "-o", str(target)])
        if done.returncode == 0:
            return target
        if not complete and source.flags and any(words in done.stderr for words in _UNKNOWN_FLAG):
            return None  # an older compiler: the library lacks this instruction set
        raise _failed(f"{compiler[0]} fails at {source.name}", done)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = [str(path) for path in pool.map(compiled, sources(wanted)) if path is not None]
    library = scratch / _library_name(wanted, system)
    done = _run([*compiler, *_LINK, *objects, "-o", str(library), *_LIBRARIES.get(system, ())])
    if done.returncode:
        raise _failed(f"{compiler[0]} fails to link", done)
    return library


def _failed(what: str, done: subprocess.CompletedProcess[str]) -> BuildFailed:
    return BuildFailed(f"{what}:\n{done.stderr.strip()}")


def _install(library: Path) -> Path:
    """Move a library to the first folder that can be written to, and remove those that it replaces."""
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
            with suppress(OSError):
                # Another version may use the cache folder, too.
                unused = folder.parent == SOURCES or time.time() - old.stat().st_mtime > _UNUSED_S
                if old.name != library.name and (sources_digest() in old.name or unused):
                    old.unlink()
        return folder / library.name
    raise BuildFailed(f"the library cannot be written: {refused}")


def sources(sets: frozenset[str] | None = None) -> list[SourceFile]:
    """Return the files to compile for this machine.

    Args:
        sets: the instruction sets; None for all.
    """
    found = []
    for line in (SOURCES / _MANIFEST).read_text("utf-8").splitlines():
        fields = line.split("#")[0].split()
        if fields and fields[1] in (_ANY, _machine()) and (sets is None or fields[2] in {_ANY, *sets}):
            found.append(SourceFile(fields[0], fields[2], tuple(fields[3:])))
    return found


def instruction_sets() -> frozenset[str]:
    """Return the instruction sets that there are sources for, of this machine's kind of processor."""
    return frozenset(source.instruction_set for source in sources()) - {_ANY}


def _compiler() -> list[str]:
    """The command of the C++ compiler.

    Raises:
        BuildFailed: there is none.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if find_program(chosen[0]) is None:
            raise BuildFailed(f"CXX names {chosen[0]}, and there is no such compiler", _MISSING)
        return chosen
    for name in _COMPILERS:
        if find_program(name):
            return [name]
    raise BuildFailed("there is no C++ compiler", _MISSING)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return run(command, variables={"LC_ALL": "C"}, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from error


def _machine() -> str:
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


def _library_name(sets: frozenset[str], system: str) -> str:
    named = "" if sets == instruction_sets() else f"-{'+'.join(sorted(sets)) or _ANY}"
    return f"edgespec-kernels-{sources_digest()}{named}{_suffix(system)}"


def _suffix(system: str = sys.platform) -> str:
    return _SUFFIXES.get(system, ".so")


def _folders() -> Iterator[Path]:
    """The folders that may hold a library, the preferred one first."""
    yield SOURCES / "compiled"
    with suppress(ModuleNotFoundError):  # set-up compiles before it has installed other packages
        from edgespec.files.user_folders import cache_folder

        yield cache_folder() / "native"


if __name__ == "__main__":
    sys.exit(main())
