"""Control sequences in a model's header reach neither terminals nor pipes; JSON keeps them, escaped.

Only a model can show this: llama.cpp repeats what its header says in error messages of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.desk import EDGESPEC, Desk
from tests.fuzz.headers import STRING, Entry, Header, small_model
from tests.tiers import slow_except

# Sets the title, clears the screen, changes the colour (also with the one-byte form of ESC [), forges a line.
HOSTILE = "x\x1b]0;TITLE\x07\x1b[2J\x1b[31mred\x9b32mgreen\x08\x7f\nError: forged"
TEMPLATE = "{{ raise_exception('" + HOSTILE.replace("\n", "\\n") + "') }}"
UNWANTED = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
PLACES = {
    "architecture": ("general.architecture",),
    "pre-tokenizer": ("tokenizer.ggml.pre",),
    "tokenizer": ("tokenizer.ggml.model",),
    "description": ("general.name", "general.author", "general.license", "tokenizer.chat_template"),
}


@pytest.fixture(scope="module")
def hostile(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models, each with control sequences in some of its metadata."""
    base = small_model(smol_path)
    folder = tmp_path_factory.mktemp("hostile")
    return {name: _written(base, keys, folder / f"{name}.gguf") for name, keys in PLACES.items()}


def _written(base: Header, keys: tuple[str, ...], path: Path) -> Path:
    header = base.copy()
    known = {entry.key.decode() for entry in header.entries}
    for key in keys:
        text = (TEMPLATE if key == "tokenizer.chat_template" else HOSTILE).encode()
        if key in known:
            header.change(key, text)
        else:
            header.entries.append(Entry(key.encode(), STRING, text))
    if "general.architecture" in keys:
        header.entries = [
            replace(entry, key=entry.key.replace(b"llama.", HOSTILE.encode() + b".", 1))
            for entry in header.entries
        ]
    path.write_bytes(header.to_bytes())
    return path


def _run(*arguments: str, stdin: str = "") -> tuple[bytes, bytes]:
    done = subprocess.run([*EDGESPEC, *arguments], input=stdin.encode(), capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert b"This is a bug" not in done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_pipe_gets_no_control_characters_of_a_header(hostile: dict[str, Path]) -> None:
    for place, path in hostile.items():
        seen = b""
        for command in (
            ["models", "show", str(path)],
            ["generate", str(path), "-p", "Hi", "--max-tokens", "1", "--draft", "none"],
            ["chat", str(path), "-p", "Hi", "--max-tokens", "1", "--draft", "none"],
            ["plan", str(path)],
            ["doctor", str(path), "--no-disk-check"],
        ):
            for stream in _run(*command):
                found = UNWANTED.search(stream)
                assert found is None, (place, command, stream[max(found.start() - 60, 0) : found.end() + 20])
                assert not any(line.startswith(b"Error: forged") for line in stream.splitlines()), stream
                seen += stream
        assert b"TITLE" in seen, f"no command showed the {place}"


@pytest.mark.parametrize("place", slow_except(["description"], PLACES))
def test_a_terminal_gets_no_control_sequences_of_a_header(hostile: dict[str, Path], place: str) -> None:
    path = hostile[place]
    for command in ("show",), ("generate", "-p", "Hi", "--max-tokens", "1", "--verbose"):
        with contextlib.closing(Desk(command[0], str(path), *command[1:], columns=200)) as desk:
            desk.leave()
            for sequence in (
                b"\x1b]0;",
                b"\x07",
                b"\x1b[2J",
                b"\x1b[31mred",
                b"\xc2\x9b",
                b"\x08",
                b"\x7f",
            ):
                assert sequence not in desk.bytes, (place, command)


def test_json_has_the_text_of_a_header_as_it_is(hostile: dict[str, Path]) -> None:
    out, _ = _run("models", "show", str(hostile["description"]), "--json")
    out = out.replace(os.linesep.encode(), b"\n")
    assert UNWANTED.search(out) is None
    assert json.loads(out)["title"] == HOSTILE


@pytest.mark.skipif(sys.platform == "win32", reason="no name has such characters there")
def test_a_file_with_an_escape_sequence_in_its_name_is_listed_without(
    hostile: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a\x1b[31m.gguf").write_bytes(hostile["description"].read_bytes())
    monkeypatch.setenv("EDGESPEC_MODELS_FOLDER", str(tmp_path))
    out, _ = _run("list")
    assert b"[31m.gguf" in out
    assert UNWANTED.search(out) is None
