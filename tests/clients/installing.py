"""Packages of the npm registry and the Python index, each in a folder of its own that is kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.clients.running import INSTALL_S, Failed, run

_COMPLETE = "complete"
_ABOUT = """\
import importlib.metadata, json, sys
about = importlib.metadata.distribution(sys.argv[1])
print(json.dumps([about.version, about.requires or []]))
"""


@dataclass(frozen=True)
class Installed:
    """A program that can be run."""

    binary: Path
    version: str


class Package(Protocol):
    """What a program is installed from."""

    @property
    def name(self) -> str:
        """The name in its registry."""
        ...

    def install(self, folder: Path) -> Installed:
        """Install the program, unless it is there.

        Args:
            folder: the package's own.

        Raises:
            Failed: it cannot be installed.
        """
        ...


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry.

    Attributes:
        command: the one of its commands that is run, or a script that uses it.
        also: other packages that the script uses.
    """

    name: str
    command: str | Path
    also: Sequence[str] = ()

    def install(self, folder: Path) -> Installed:
        """Install it with npm."""
        binary = folder / "node_modules" / ".bin" / self.command
        about = folder / "node_modules" / self.name / "package.json"
        if isinstance(self.command, Path):  # Node looks for packages where the script is
            binary = folder / self.command.name
        if not about.exists():
            if shutil.which("npm") is None:
                raise Failed("not installed: there is no npm")
            _clear(folder)
            (folder / "package.json").write_text('{"private": true}\n')
            npm = ["npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit"]
            _install([*npm, self.name, *self.also], folder)
        if isinstance(self.command, Path):
            shutil.copy(self.command, binary)
        if not binary.exists():
            shutil.rmtree(folder, ignore_errors=True)
            raise Failed("not installed: the package has no such command")
        return Installed(binary, str(json.loads(about.read_text())["version"]))


@dataclass(frozen=True)
class PythonPackage:
    """A package of the Python index; what is run is the Python of its environment.

    Attributes:
        pythons: the versions of Python that it can be installed for, the best first.
        without: those of its requirements that are left out, because the task does not use them.
        also: other packages that are used with it.
    """

    name: str
    pythons: Sequence[str]
    without: Sequence[str] = ()
    also: Sequence[str] = ()

    def install(self, folder: Path) -> Installed:
        """Install it with pip: first the package, then those of its requirements that are used."""
        python = folder / "bin" / "python"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        made = (folder / _COMPLETE).exists()
        if not made:
            base = _python_of(self.pythons)
            _clear(folder)
            _install([base, "-m", "venv", str(folder)], folder, environment)
            _install([*pip, "--no-deps", self.name], folder, environment)
        done = run([str(python), "-c", _ABOUT, self.name], folder, environment, INSTALL_S)
        if done.failure:
            raise Failed(f"not installed: {done.failure}")
        version, requirements = json.loads(done.output)
        if not made:
            needed = folder / "requirements.txt"
            needed.write_text("\n".join([*used(requirements, self.without), *self.also]) + "\n")
            _install([*pip, "-r", str(needed)], folder, environment)
            (folder / _COMPLETE).touch()
        return Installed(python, str(version))


def used(requirements: Sequence[str], without: Sequence[str]) -> list[str]:
    """The requirements of a package, less those of its extras and those that are left out."""
    names = {_plain(name) for name in without}
    return [
        each
        for each in requirements
        if not re.search(r";.*\bextra\b", each) and _plain(re.split(r"[\s\[;(<>=!~]", each)[0]) not in names
    ]


def _plain(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _python_of(versions: Sequence[str]) -> str:
    """The first of some versions of Python that is on this machine."""
    for version in versions:
        names = [f"python{version}", sys.executable]
        for found in filter(None, map(shutil.which, names)):
            told = run(
                [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                Path.cwd(),
                os.environ,
                INSTALL_S,
            )
            if told.output.strip() == version:
                return found
    raise Failed(f"not installed: there is no Python {' or '.join(versions)}")


def _clear(folder: Path) -> None:
    """Remove what another run left half installed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _install(command: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Run a step of an installation, which leaves nothing behind where it fails."""
    done = run(command, folder, environment, INSTALL_S)
    if done.failure:
        shutil.rmtree(folder, ignore_errors=True)
        raise Failed(f"not installed: {done.failure}")
