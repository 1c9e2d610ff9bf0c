"""Environments of Python libraries, each with what it needs and nothing of the tests' own; made once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.clients.running import INSTALL_S, clean_environment, last_line
from tests.conftest import TEST_MODELS

_FOLDER = TEST_MODELS.parent / "test-clients"
_COMPLETE = "complete"


def python_with(requirement: str) -> Path:
    """The Python of an environment that has a library; skips the test where it cannot be installed.

    Args:
        requirement: as pip takes it.
    """
    folder = _FOLDER / requirement.partition("[")[0]
    python = folder / "bin" / "python"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(_FOLDER / f"{folder.name}.lock"):  # of several workers, one makes it
        if not (folder / _COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            made = failure_of([sys.executable, "-m", "venv", str(folder)])
            made = made or failure_of([str(python), "-m", "pip", "install", "--quiet", requirement])
            if made:
                shutil.rmtree(folder, ignore_errors=True)
                pytest.skip(f"{requirement} cannot be installed: {made}")
            (folder / _COMPLETE).touch()
    return python


def output_of(python: Path, *arguments: str | Path, home: Path, **environment: str) -> str:
    """The last line that a script in an environment prints; fails with what it complains of if it fails."""
    done = subprocess.run(
        [str(python), *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env=clean_environment(home, **environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def failure_of(command: list[str]) -> str:
    """The reason why a command failed; empty if it did not."""
    try:
        done = subprocess.run(
            command,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {INSTALL_S} s"
    return last_line(done.stderr or done.stdout) if done.returncode else ""
