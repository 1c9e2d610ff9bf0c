"""The virtual environment that scripts/setup.py fills: what is in it, and the processes that fill it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import build_fixes
from packages import Packages
from progress import Progress

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL = 30  # lines

# Runs inside the environment: what is installed there, as JSON.
LIST_INSTALLED = """
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}))
"""


class SetupError(Exception):
    """Something a person has to put right, with what to do about it."""


class Environment:
    """A virtual environment, and what this script put into it.

    Attributes:
        build: where llama.cpp is compiled; kept until that is done, so that it can be continued.
        cmake_args: options of llama.cpp's build that were asked for.
        packages: installs into it.
    """

    def __init__(self, path: Path, progress: Progress | None = None, cmake_args: str = "") -> None:
        folder, suffix = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")
        self.path = path
        self.python = path / folder / f"python{suffix}"
        self.log = path / "setup.log"
        self.compiling_log = path / "setup-llama.cpp.log"
        self.wheels = path / "wheels"
        self.build = path / "llama.cpp"
        self.progress = progress or Progress()
        self.cmake_args = cmake_args
        self.packages = Packages(self)
        self._mark = path / "setup.json"
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()
        self._held: tuple[int, ...] = ()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which no other set-up works here, nor anything that one which was killed has begun."""
        if sys.platform == "win32":
            yield
            return
        folder = next(path for path in self.path.parents if path.exists())
        held = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                self._wait_for_lock(held, folder)
            self._held = (held,)  # processes inherit it, and hold it until they end
            yield
        finally:
            self._held = ()
            os.close(held)

    def _wait_for_lock(self, held: int, folder: Path) -> None:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.progress.say(f"Waiting for another set-up in {folder} to end")
                fcntl.flock(held, fcntl.LOCK_EX)

    def prepare(self) -> None:
        """Begin new logs in its folder, which is emptied unless a whole environment is there."""
        if not self._has_pip():
            if self.path.exists() and any(self.path.iterdir()) and not self._is_venv():
                raise SetupError(
                    f"{self.path} is there and is no virtual environment.\nChoose another place: --venv PATH"
                )
            self._empty()
        self.log.write_text("", "utf-8")
        self.compiling_log.write_text("", "utf-8")

    def create(self) -> None:
        """Make it in its folder, unless it is there, with what installs packages.

        Raises:
            SetupError: it cannot be created.
        """
        has_pip = self._has_pip()
        if not has_pip:
            self.progress.say(f"environment: creating {self.path}")
            make_venv(self.path, "--without-pip")
        if not self.packages.begin(has_pip=has_pip):
            raise self.failure("Is this Python complete, and the disk not full?")

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

    def forget_halves(self) -> None:
        """Have packages installed again that were being installed when that was killed.

        pip and uv note themselves as the installer when all files of a package are there.
        """
        for folder in self._in_site_packages("*.dist-info"):
            if not (folder / "INSTALLER").exists():
                shutil.rmtree(folder, ignore_errors=True)

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
        """True if llama.cpp was compiled with the options that are asked for, if any are, and works here."""
        mark = self._read_mark()
        works = not build_fixes.are_needed() or mark.get("build_fixes") == build_fixes.digest()
        return works and self.cmake_args in ("", mark.get("cmake_args")) and self._reads_images()

    def mark_current(self, *, dev: bool, compiled: bool) -> None:
        """Note what is installed now.

        Args:
            compiled: llama.cpp was compiled for this environment just now.
        """
        before = self._read_mark()
        mark = {
            "inputs": inputs_digest(),
            "dev": dev,
            "cmake_args": self.cmake_args or before.get("cmake_args", ""),
            "build_fixes": build_fixes.digest() if compiled else before.get("build_fixes", ""),
            "packages": self.installed(),
        }
        self._mark.write_text(json.dumps(mark, indent=1), "utf-8")

    def run(
        self,
        *arguments: str,
        extra: dict[str, str] | None = None,
        log: Path | None = None,
        python: str = "",
    ) -> bool:
        """Run `python -m ARGUMENTS` with its output going to a log. Returns whether it worked.

        Args:
            python: another one than the environment's.
        """
        command = [python or str(self.python), "-m", *arguments]
        with (log or self.log).open("a", encoding="utf-8") as output:
            output.write(f"\n$ {' '.join(map(shlex.quote, command))}\n")
            output.flush()
            with self._lock:
                if self._stopped:
                    return False
                running = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=self.variables(extra or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that what it starts in turn can be ended with it
                    pass_fds=self._held,
                )
                self._running.add(running)
            try:
                return running.wait() == 0
            finally:
                with self._lock:
                    self._running.discard(running)

    def variables(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The variables of a process that is run here."""
        return {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **extra}

    def stop(self) -> None:
        """End what is running, and begin nothing more."""
        with self._lock:
            self._stopped = True
            for running in self._running:
                if sys.platform == "win32":
                    running.terminate()
                else:
                    with suppress(ProcessLookupError):
                        os.killpg(running.pid, signal.SIGTERM)

    def failure(self, hint: str, log: Path | None = None) -> SetupError:
        """The end of a log as an error."""
        path = log or self.log
        return SetupError(f"this failed:\n{log_tail(path)}\n{hint}\nThe whole output is in {path}")

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

    def _in_site_packages(self, pattern: str) -> list[Path]:
        places = ("lib/python*/site-packages", "Lib/site-packages")
        return [path for place in places for path in self.path.glob(f"{place}/{pattern}")]

    def _reads_images(self) -> bool:
        """False if llama.cpp was compiled here without its library for images, as it once was."""
        folders = self._in_site_packages("llama_cpp/lib")
        return not folders or any(any(folder.glob("*mtmd*")) for folder in folders)

    def _has_pip(self) -> bool:
        """False where creating it was interrupted: pip comes last."""
        if not self.python.exists():
            return False
        asked = [str(self.python), "-I", "-m", "pip", "--version"]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    def _is_venv(self) -> bool:
        return (self.path / "pyvenv.cfg").exists()

    def _empty(self) -> None:
        """Leave nothing in the folder but the mark of an environment, by which the next set-up knows it."""
        self.path.mkdir(parents=True, exist_ok=True)
        mark = self.path / "pyvenv.cfg"
        mark.touch()
        for inner in self.path.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner)
            elif inner != mark:
                inner.unlink()


def make_venv(path: Path, *options: str) -> None:
    """Create a virtual environment.

    Args:
        options: further ones of `python -m venv`.

    Raises:
        SetupError: it cannot be created.
    """
    # With -m, so that a Python inside an environment makes one of its own base. Without -I, -m imports
    # from the working folder first.
    made = subprocess.run(
        [sys.executable, "-I", "-m", "venv", *options, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        raise SetupError(f"{path} cannot be created.\n{made.stdout.strip()}")


def log_tail(log: Path) -> str:
    """The last lines of a log, indented."""
    lines = log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL:]
    return "\n".join(f"  {line}" for line in lines)


def inputs_digest() -> str:
    """Changes when an installation made before is out of date, or belongs to another folder."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    return hashlib.sha256(b"\0".join([str(ROOT).encode(), *(f.read_bytes() for f in files)])).hexdigest()


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def public(version: str) -> str:
    """A version without the name of its build: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]
