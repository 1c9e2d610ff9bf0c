"""Examples of the README and of the pages that continue it work as shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.command_table import COMMANDS
from tests.program import run_here

ROOT = Path(__file__).parents[2]
GROUPS = [name for name, command in COMMANDS.items() if command.name == "app"]
PAGES = ("README.md", "docs/how-to/commands.md", "docs/how-to/python.md")
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", blocks("python"))
def test_library_examples_run(example: str, smol_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert len(done.stdout.split()) > 3


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_every_command_is_one_that_exists(line: str) -> None:
    command = line.split("#")[0]
    for part in re.split(r"&&|\|", command):
        words = shlex.split(part)
        if words[0] == "python3":
            assert (ROOT / words[1]).is_file()
        elif words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file()
        elif words[0].endswith("edgespec"):
            called = words[1:3] if words[1] in GROUPS else words[1:2]
            shown = run_here(*called, "--help")
            assert shown.returncode == 0
            for flag in (word for word in words[2:] if word.startswith("-")):
                assert flag in shown.stdout
