"""Environments that have nothing of this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

DROPPED = ("EDGESPEC", "PYTHON", "LLAMA_CPP")  # the beginnings of variables


def run(*command: str, cwd: Path, status: int = 0, **variables: str) -> str:
    """Run a command outside this checkout's environment; returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def installed(wheels: Sequence[Path], folder: Path, *, without: str = "edgespec") -> Path:
    """Make an environment with wheels, EdgeSpec's among them, and this environment's other packages.

    The other packages are linked: nothing is compiled or downloaded.

    Args:
        without: a regular expression for the names of packages that are left out.

    Returns:
        The folder of the environment's programs.
    """
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--symlinks", "--without-pip", str(environment), cwd=folder)
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    packages = Path(paths["purelib"])
    for item in Path(sysconfig.get_paths()["purelib"]).iterdir():
        left_out = re.search(without, item.name.lower()) or item.suffix == ".pth"
        if not left_out and not (packages / item.name).exists():
            (packages / item.name).symlink_to(item)
    python = str(Path(paths["scripts"]) / "python")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--quiet"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *map(str, wheels), cwd=folder)
    where = run(python, "-c", "import edgespec; print(edgespec.__file__)", cwd=folder)
    assert str(environment) in where
    return Path(paths["scripts"])
