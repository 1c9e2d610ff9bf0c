"""Help in windows of any width."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.core
import typer.main

from edgespec.cli.help_page import help_of, page
from edgespec.cli.main import app, main


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


STYLE = re.compile(r"\x1b\[[0-9;]*m")
COMMANDS = dict(commands(typer.main.get_command(app), "edgespec"))


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_the_window_and_no_word_is_cut(path: str, columns: int) -> None:
    command = COMMANDS[path]
    text = STYLE.sub("", page(command, typer.Context(command, info_name=path), columns))
    examples = {line for line in text.splitlines() if line.startswith("  edgespec ")}  # to be copied
    for line in {*text.splitlines()} - examples:
        assert len(line) <= columns
        assert "\u2026" not in line
    words = " ".join(text.split())
    for parameter in command.params:
        assert " ".join(help_of(parameter).split()) in words
        assert {*parameter.opts} <= {
            *text.replace(",", " ").split()
        } or parameter.param_type_name == "argument"


def test_arguments_come_first_and_defaults_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "Arguments:"
    assert titles[-2:] == ["Options:", "Examples:"]
    assert "Requests to answer at once. Default: 8." in text


def test_help_needs_no_rich() -> None:
    program = (
        "import sys; from edgespec.cli.main import main; main(['--help']); "
        "print([m for m in ('rich', 'psutil') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_help_imports_no_command() -> None:
    program = (
        "import sys; from edgespec.cli.main import main; main(['--help']); main(['genrate']); "
        "print([m for m in sys.modules if m.startswith('edgespec.cli.commands.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Did you mean 'generate'?" in done.stderr
    assert done.stderr.endswith("[]\n")


def test_the_overview_says_what_each_command_says_of_itself() -> None:
    group: Any = typer.main.get_command(app)
    for name, summary, heading in group.overview():
        command = group.commands[name]
        assert summary == " ".join(command.help.split("\n\n")[0].split())
        assert isinstance(command, typer.core.TyperGroup) or (command.rich_help_panel or None) == heading
