"""Compiles llama.cpp for scripts/setup.py: its Python bindings' sources become a wheel.

The folder of the build stays until the wheel is made, so that an interrupted build resumes. A
finished wheel is kept beside pip's cache, for the next environment on this machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import backends
import build_fixes
from environment import Environment
from progress import duration

UNITS = Path(__file__).resolve().with_name("llama_cpp.cmake")
BINDINGS = "llama-cpp-python"
TOOLS = ["scikit-build-core[pyproject]>=0.9.2"]  # as the bindings' pyproject.toml has it
CORE_SECONDS = 300  # what a core of a usual processor takes to compile it, measured
_KEPT_WHEELS = 4

# Runs among the sources, and prints what else their build needs, such as CMake where the system has none.
_ASK_NEEDED = (
    "from scikit_build_core.build import get_requires_for_build_wheel as n; print('\\n'.join(n({})))"
)


def build_llama_cpp(
    environment: Environment, installed: dict[str, str], version: str, *, rebuild: bool = False
) -> bool:
    """Put the wheel of llama-cpp-python into the environment's folder of wheels, unless it is installed.

    Returns:
        Whether there is a wheel.
    """
    progress = environment.progress
    if installed.get(BINDINGS) == version and environment.has_build() and not rebuild:
        progress.say(f"llama.cpp: {BINDINGS} {version} is installed")
        return False
    options = _options(environment)
    key = _key(version, options)
    known = _known_wheels(environment)
    shutil.rmtree(environment.wheels, ignore_errors=True)
    if known is not None and not rebuild and (wheels := list((known / key).glob("*.whl"))):
        shutil.copytree(known / key, environment.wheels)
        progress.say(f"llama.cpp: {wheels[0].name} was compiled here before")
        return True
    build = environment.build / key
    if rebuild:
        shutil.rmtree(build, ignore_errors=True)
    _remove_others(environment.build, 0, build)
    source = _fetch(environment, build, version)
    _compile(environment, build, source, options)
    if known is not None:
        _keep(environment.wheels, known / key)
    return True


def compiler_advice(system: str) -> str:
    if system == "win32":
        return 'Install the Visual Studio Build Tools with "Desktop development with C++".'
    if system == "darwin":
        return "Install the command line tools: xcode-select --install"
    return (
        "On Debian and Ubuntu: sudo apt install build-essential\n"
        "On Fedora:            sudo dnf install gcc-c++"
    )


def has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None


def _options(environment: Environment) -> str:
    """The options given, or those of the graphics card of this machine."""
    progress = environment.progress
    options = environment.cmake_args
    if not options and (found := backends.found(sys.platform)) is not None:
        options = backends.arguments(found)
        progress.say(f"llama.cpp: with {found}, which was found here; --backend cpu leaves it out")
    elif not options and has_nvidia():
        progress.say(f"llama.cpp: without the graphics card. {backends.missing('cuda', sys.platform)}")
    if "-DGGML_CUDA=ON" in options and (minutes := backends.minutes("cuda")) is not None:
        progress.say(f"llama.cpp: compiling for CUDA takes about {minutes} minutes with all cores")
    return options


def _variables(options: str) -> dict[str, str]:
    """What the build finds in its environment."""
    # The part that reads images could start another program to read films. The one that lets several machines
    # hold one model is two files. Warnings are for llama.cpp's own developers, and take time.
    own = [
        "-DLLAVA_BUILD=ON",
        "-DMTMD_VIDEO=OFF",
        "-DGGML_RPC=ON",
        "-DLLAMA_ALL_WARNINGS=OFF",
        "-DGGML_ALL_WARNINGS=OFF",
        shlex.quote(f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={UNITS.as_posix()}"),
    ]
    variables = {"CMAKE_ARGS": " ".join([*own, options]).strip()}
    return {
        **variables,
        **build_fixes.with_fixes({**os.environ, **variables}),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
    }


def _key(version: str, options: str) -> str:
    """Changes with everything that a wheel depends on: its options, the compiler, the processor."""
    parts = [version, options, sys.platform, platform.machine(), platform.processor()]
    parts += [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")]
    parts += [hashlib.sha256(UNITS.read_bytes()).hexdigest()]
    parts += [build_fixes.digest() if build_fixes.applies() else ""]
    compiler = [*shlex.split(os.environ.get("CXX", "")), "c++"][:1]
    # The macros that the compiler defines for this processor name all of its instruction sets.
    native = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    for command in ([*compiler, "--version"], native):
        try:
            parts += [subprocess.run(command, capture_output=True, text=True, check=False).stdout]
        except OSError:
            parts += [""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _known_wheels(environment: Environment) -> Path | None:
    """The folder of the wheels that were compiled on this machine; None if pip may keep nothing."""
    asked = [str(environment.python), "-I", "-m", "pip", "cache", "dir"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    folder = said.stdout.strip()
    return Path(folder) / "edgespec-llama.cpp" if said.returncode == 0 and folder else None


def _keep(wheels: Path, folder: Path) -> None:
    """Keep wheels for the next environment."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        shutil.copytree(wheels, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk; the wheel is not needed again
    _remove_others(folder.parent, _KEPT_WHEELS - 1, folder)


def _remove_others(parent: Path, kept: int, folder: Path) -> None:
    """Remove the folders in `parent` other than `folder`, but for the newest `kept`."""
    others = [path for path in parent.glob("*") if path != folder]
    for path in sorted(others, key=lambda path: -path.stat().st_mtime)[kept:]:
        shutil.rmtree(path, ignore_errors=True)


def _fetch(environment: Environment, build: Path, version: str) -> Path:
    """Download the sources and what compiles them, unless they are there; returns the sources' folder."""
    source, tools, downloads = build / "source", build / "tools", build / "downloads"
    log = environment.compiling_log

    def install_tools(*wanted: str) -> bool:
        return environment.packages.install("--upgrade", "--target", str(tools), *wanted, log=log)

    def fetched() -> bool:
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        download = ["pip", "download", "--no-input", "--no-deps", "--no-build-isolation", "--no-binary"]
        wanted = [BINDINGS, "--dest", str(downloads), f"{BINDINGS}=={version}"]
        if not install_tools(*TOOLS) or not environment.run(*download, *wanted, extra=_paths(build), log=log):
            return False
        [archive] = downloads.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            opened.extractall(build / "unpacked")
        [unpacked] = (build / "unpacked").iterdir()
        needed = subprocess.run(
            [str(environment.python), "-c", _ASK_NEEDED],
            cwd=unpacked,
            env={**os.environ, **_paths(build)},
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
        if needed and not install_tools(*needed):
            return False
        unpacked.replace(source)
        return True

    if source.exists():
        environment.progress.say("llama.cpp: resuming the compilation that was interrupted")
    elif not environment.progress.during(
        "llama.cpp", f"fetching the sources of {BINDINGS} {version}", fetched
    ):
        raise environment.failure("Check the network connection, and try again.", log)
    return source


def _compile(environment: Environment, build: Path, source: Path, options: str) -> None:
    command = ["pip", "wheel", "--no-input", "--verbose", "--no-deps", "--no-build-isolation"]
    objects = {"SKBUILD_BUILD_DIR": str(build / "objects")}
    cores = os.cpu_count() or 1

    def compiled() -> bool:
        return environment.run(
            *(*command, "--no-cache-dir", "--wheel-dir", str(environment.wheels), str(source)),
            extra={**_variables(options), **_paths(build), **objects},
            log=environment.compiling_log,
        )

    text = "compiling it"
    if not options:
        text += f", about {duration(CORE_SECONDS / cores)} on {cores} cores of usual speed"
    if not environment.progress.during("llama.cpp", text, compiled, environment.compiling_log):
        raise environment.failure(
            "If the compiler ran out of memory, close other programs and try again.\n"
            f"If the compiler is at fault: {compiler_advice(sys.platform)}",
            environment.compiling_log,
        )


def _paths(build: Path) -> dict[str, str]:
    """Variables by which Python and the system find what was installed to compile with."""
    tools = build / "tools"
    path = os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", "")])
    return {"PYTHONPATH": str(tools), "PATH": path}
