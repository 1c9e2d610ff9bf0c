"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.cli.main import main
from tests.unit.talking import TalkingEngine, TalkingSession, write_lines


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TalkingEngine:
    talker = TalkingEngine()
    monkeypatch.setattr(edgespec, "open_engine", talker.open_engine, raising=False)
    return talker


@pytest.fixture
def talking_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations whose answers are the talking engine's."""
    monkeypatch.setattr("edgespec.engine.sessions.session.Session", TalkingSession)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """The output file of `run`."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def run(
    engine: TalkingEngine, tmp_path: Path, answers: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a batch over lines; gives the exit code and standard error. Nothing is loaded yet afterwards."""

    def batch(lines: list[Any], *flags: str) -> tuple[int, str]:
        prompts = write_lines(tmp_path / "in.jsonl", *lines)
        engine.asked.clear()
        engine.loaded_with = {}
        code = main(["generate", *flags, "--input", str(prompts), "--output", str(answers)])
        return code, capsys.readouterr().err

    return batch
