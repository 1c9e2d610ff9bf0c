"""Commands in hints run in the environment that EdgeSpec is in."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.base.installation import module_command
from tests.links import needs_links


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python of an environment in a folder whose name has a space."""
    folder = tmp_path / "an environment" / "bin"
    folder.mkdir(parents=True)
    path = folder / "python"
    path.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


@needs_links
def test_an_environment_that_is_not_activated_is_named(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = module_command("this")
    assert shlex.split(command) == [str(program), "-m", "this"]
    assert "Zen of Python" in subprocess.check_output(command, shell=True, text=True)
    monkeypatch.chdir(program.parents[1])
    assert module_command("this") == "bin/python -m this"


@needs_links
def test_an_activated_environment_is_not_named(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    assert module_command("this") == "python -m this"
