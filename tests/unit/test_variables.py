"""Environment variables with EdgeSpec's prefix that no command reads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import edgespec
from edgespec.cli import config_file
from edgespec.cli.main import app, main

PREFIX = "EDGESPEC_"


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (["MEMROY"], "variable EDGESPEC_MEMROY (did you mean EDGESPEC_MEMORY?)."),
        (["PROT", "FOO"], "variables EDGESPEC_FOO, EDGESPEC_PROT (did you mean EDGESPEC_PORT?)."),
        (["PART"], "variable EDGESPEC_PART (did you mean EDGESPEC_PORT?)."),
        (["SERVICE_HOST"], "variable EDGESPEC_SERVICE_HOST."),
    ],
)
def test_unknown_variables_are_named_once_on_standard_error(
    given: list[str], warning: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in given:
        monkeypatch.setenv(PREFIX + name, "secret")
    assert main(["config", "--path"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err == f"Ignored unknown environment {warning}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEMORY", "1GiB"),
        ("PORT", "8000"),
        ("N", "2"),
        ("SECONDS", "9"),
        ("QUANTIZATION", "q4_0"),
        ("MEMROY", ""),
    ],
)
def test_known_and_empty_variables_are_not(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    assert main(["config", "--path"]) == 0
    assert capsys.readouterr().err == ""


def test_help_and_the_version_come_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"{PREFIX}MEMROY", "1GiB")
    for arguments in (["--version"], ["--help"], ["chat", "--help"]):
        main(arguments)
    assert capsys.readouterr().err == ""


def test_variables_of_loading_import_no_further_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}MEMORY", "1GiB")
    program = (
        "import sys; from edgespec.cli.main import main; main(['config', '--path']); "
        "print(*[name for name in sys.modules if name.startswith('edgespec.cli.commands.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "edgespec.cli.commands.config"


def test_every_variable_in_the_sources_is_known() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = set(config_file._known(commands, "chat"))
    found = set(_names_in(Path(edgespec.__file__).parent))
    assert {f"{PREFIX}CONFIG", f"{PREFIX}KERNELS", f"{PREFIX}MODELS_FOLDER"} <= found
    assert found <= known


def _names_in(package: Path) -> Iterator[str]:
    """The strings in the sources of a package that are names of variables."""
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and value.startswith(PREFIX) and value[len(PREFIX) :].isidentifier():
                yield value
