"""`edgespec sessions` and /export: saved conversations without their model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from edgespec.cli.conversation.export import Transcript, export, export_path
from edgespec.cli.main import main
from edgespec.engine.sessions.file import Conversation, SessionFile, sessions_folder
from edgespec.errors import OutputError

TALK = [{"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "- Rome\n- Oslo"}]
MARKDOWN = (
    "# Conversation with my talker\n\n## System prompt\n\nBe brief.\n\n"
    "## Question\n\nWhere to?\n\n## Answer\n\n- Rome\n- Oslo\n"
)


@pytest.fixture
def trip() -> Path:
    file = SessionFile("trip")
    file.write(Conversation({"model": f"my talker.gguf {0:032x}"}, "Be brief.", TALK))
    file.states.mkdir()
    (file.states / "a.kv").write_bytes(b"0" * 2048)
    file.close()
    return file.path


def test_listing(trip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "list"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "TURNS", "SAVED", "SIZE", "MODEL", "FIRST", "QUESTION"]
    assert line.startswith("trip  1      20")
    assert line.endswith("  my talker.gguf  Where to?")
    assert main(["sessions", "list", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["sessions"]
    assert (record["name"], record["turns"], record["path"]) == ("trip", 1, str(trip))
    assert record["bytes"] > 2048


def test_there_is_none_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "list"]) == 0
    assert (
        capsys.readouterr().err == "No saved conversations yet. To save one: edgespec chat --session NAME\n"
    )


def test_showing(trip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("trip", str(trip)):
        assert main(["sessions", "show", name]) == 0
        assert capsys.readouterr().out == MARKDOWN
    assert main(["sessions", "show", "trip", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "my talker",
        "messages": [{"role": "system", "content": "Be brief."}, *TALK],
    }
    assert main(["sessions", "show", "tripp"]) == 2
    assert capsys.readouterr().err == "Error: There is no session 'tripp'.\nDid you mean trip?\n"


def test_removing(trip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "rm", "trip"]) == 2
    assert "Add --yes to remove it." in capsys.readouterr().err
    assert trip.exists()
    held = SessionFile("trip")
    assert main(["sessions", "rm", "trip", "--yes"]) == 1
    assert "is open in another program" in capsys.readouterr().err
    held.close()
    assert main(["sessions", "rm", "trip", "--yes"]) == 0
    assert "Removed trip: " in capsys.readouterr().err
    assert list(sessions_folder().iterdir()) == []


def test_other_files_are_not_removed(trip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, moved = tmp_path / "package.json", tmp_path / "moved.json"
    other.write_text('{"name": "mine"}')
    moved.write_bytes(trip.read_bytes())
    assert main(["sessions", "rm", str(moved), str(other), "--yes"]) == 2
    assert capsys.readouterr().err == f"Error: {other} is not a saved session.\nCheck the path.\n"
    assert other.exists()
    assert moved.exists()
    assert main(["sessions", "rm", str(moved), "--yes"]) == 0
    assert not moved.exists()
    trip.write_text("damaged")
    assert main(["sessions", "rm", "trip", "--yes"]) == 0, "EdgeSpec's own folder has nothing else"


def test_exporting(tmp_path: Path) -> None:
    talk = Transcript("Be brief.", TALK, "my talker")
    export(export_path(str(tmp_path / "trip")), talk)
    assert (tmp_path / "trip.md").read_text() == MARKDOWN
    export(tmp_path / "trip.json", talk)
    assert json.loads((tmp_path / "trip.json").read_text()) == talk.to_json()
    with pytest.raises(OutputError, match="cannot be written"):
        export(tmp_path / "nowhere" / "trip.md", talk)


@pytest.mark.skipif(sys.platform == "win32", reason="no such pipes there")
def test_a_pipe_among_sessions_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    sessions_folder().mkdir(parents=True, exist_ok=True)
    os.mkfifo(sessions_folder() / "pipe.json")
    assert main(["sessions", "list"]) == 0
    assert main(["sessions", "show", "pipe"]) == 2
    assert "Did you mean" not in capsys.readouterr().err
