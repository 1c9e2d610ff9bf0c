"""Paths and folders that cannot be used: each is said in words, with an exit code of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.main import main

TOO_LONG = "x" * 300  # the system refuses even to look for such a file
SAYS_SO = pytest.mark.skipif(sys.platform == "win32", reason="a name that is too long is not found there")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return " ".join(err.split())


@SAYS_SO
@pytest.mark.parametrize("command", ["chat Hi", "list", "config"])
def test_a_configuration_that_cannot_be_looked_for(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_CONFIG", TOO_LONG)
    assert main(command.split()) == 2
    assert said(capsys).endswith(
        "cannot be read: File name too long. "
        "Correct it, or set EDGESPEC_CONFIG to another file; /dev/null is an empty one."
    )


@SAYS_SO
def test_a_session_that_cannot_be_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "show", f"{TOO_LONG}.json"]) == 2
    assert "cannot be read: File name too long. Check the path" in said(capsys)


@pytest.mark.skipif(sys.platform == "win32", reason="a folder that is in use cannot be removed there")
@pytest.mark.parametrize("command", ["generate -m a.gguf -p Hi", "plan b.gguf", "show c.gguf"])
def test_a_current_folder_that_was_removed(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    program = (
        "import os, sys; from edgespec.cli.main import main; "
        f"os.rmdir({str(folder)!r}); sys.exit(main({command.split()!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "Error: The current folder no longer exists.\nChange to another one.\n"


def test_a_profile_that_cannot_be_stored_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blocked").write_text("no folder")
    for name in ("XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "blocked"))
    assert main(["profile", "none.gguf", "--seconds", "1"]) == 1
    assert re.search(
        r"cannot be written: [^.]+\. Allow writing there: the results are stored for later runs\.$",
        said(capsys),
    )


def test_a_folder_is_no_model_to_remove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", str(tmp_path)]) == 1
    assert said(capsys) == f"Error: {tmp_path} is a folder, not a model file. Name a .gguf file."


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["worker", "here"], "Got unexpected extra argument(s) (here) See 'edgespec worker --help'."),
        (["generate", "--input", ""], "--input is empty. Give a file to --input."),
        (["generate", "-p", "Hi", "--grammar", ""], "--grammar is empty. Give a file to --grammar."),
        (
            ["generate", "-p", "Hi", "--json-schema", ""],
            "--json-schema is empty. Give a file to --json-schema.",
        ),
    ],
)
def test_arguments_that_name_nothing(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said(capsys) == f"Error: {what}"
