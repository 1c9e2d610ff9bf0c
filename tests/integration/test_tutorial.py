"""The tutorial works as written: its commands are run in the order of the page, with the bundled model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.desk import Desk
from tests.serving import free_port

pytestmark = [pytest.mark.usefixtures("at_a_desk"), pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
# What they show would compile llama.cpp, or needs models that are not here.
NOT_RUN = ("Install", "With a model that does not fit")
TYPED = ">>> "


@dataclass(frozen=True)
class Step:
    """A command, and what is typed while it runs."""

    section: str
    command: str
    typed: tuple[str, ...] = ()


def steps() -> list[Step]:
    """The commands of the page; what a block shows to be typed belongs to the command before it."""
    found: list[Step] = []
    for section in PAGE.split("\n## ")[1:]:
        name, _, body = section.partition("\n")
        for language, block in re.findall(r"```(\w+)\n(.*?)```", body, re.DOTALL):
            if language == "sh":
                found += [Step(name, line) for line in block.splitlines()]
                continue
            typed = tuple(line.removeprefix(TYPED) for line in block.splitlines() if line.startswith(TYPED))
            if typed:
                found[-1] = Step(name, found[-1].command, typed)
    return [step for step in found if step.section not in NOT_RUN]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with the program on the path; answers are short there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    edgespec = programs / "edgespec"
    edgespec.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m edgespec "$@"\n')
    edgespec.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("EDGESPEC_MAX_TOKENS", "12")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_first_ten_minutes(folder: Path) -> None:
    port = str(free_port())
    page = [Step(s.section, s.command.replace("8080", port), s.typed) for s in steps()]
    assert len(page) > 15
    with contextlib.ExitStack() as servers:
        said = {step.command: _run(step, servers) for step in page}
    assert "Why is the sea blue?" in (folder / "sky.md").read_text()
    assert "mountains" in said["edgespec sessions show trip"]
    assert len((folder / "haiku.txt").read_text().split()) > 3
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == ["Name a colour.", "Name an animal."]
    form = next(text for command, text in said.items() if "--json-schema" in command)
    assert json.loads(form) in ("happy", "sad")
    assert "pirate" in said["edgespec config"]
    assert "TOKENS/S" in said["edgespec plan --memory 1GiB"]
    (chat,) = (json.loads(text) for command, text in said.items() if "chat/completions" in command)
    assert chat["choices"][0]["message"]["content"]
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


def test_what_is_not_run_is_named_in_the_page() -> None:
    assert {section.partition("\n")[0] for section in PAGE.split("\n## ")[1:]} >= set(NOT_RUN)


def _run(step: Step, servers: contextlib.ExitStack) -> str:
    """Run a step; returns what it printed."""
    if step.command.startswith("edgespec chat"):
        return _at_a_terminal(step)
    if step.command.startswith("edgespec serve"):
        servers.enter_context(_served(step.command))
        return ""
    done = subprocess.run(["bash", "-ec", step.command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (step.command, done.stderr)
    return done.stdout


def _at_a_terminal(step: Step) -> str:
    assert step.typed[-1] == "/bye"
    with contextlib.closing(Desk("-c", step.command, program=["bash"])) as desk:
        for line in step.typed:
            desk.wait_for(">>>")
            desk.type(line + "\r")
        assert desk.leave() == 0
        shown = "\n".join(desk.screen)
    assert not re.search(r"Error|There is no command", desk.bytes.decode()), shown
    return shown


@contextlib.contextmanager
def _served(command: str) -> Iterator[None]:
    words = shlex.split(command)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        try:
            said = program.stderr.readline()
            assert "Serving" in said, said
            yield
        finally:
            program.kill()
