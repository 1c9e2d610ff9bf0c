"""Paths that people give: prompts from files, folders with a model, URLs of files, and what is no text."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from edgespec.cli import prompt, utf8
from edgespec.cli.main import main
from edgespec.errors import ModelFileError
from edgespec.files.user_folders import expanded
from edgespec.models.hub import catalog
from tests.links import put
from tests.unit.privileges import unprivileged
from tests.unit.talking import TalkingEngine

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["-f", "q.txt"], "Why?"),
        (["-f", "notes.md", "-f", "q.txt"], "notes.md:\n```\nBlue.\n```\n\nWhy?"),
        (["-f", "q.txt", "Now?"], "q.txt:\n```\nWhy?\n```\n\nNow?"),
        (["-f", "{}/q.txt"], "Why?"),
    ],
    ids=["prompt", "two", "before", "url"],
)
def test_a_prompt_from_a_file(
    arguments: list[str],
    asked: str,
    engine: TalkingEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.txt").write_text("Why?\r\n", newline="")
    (tmp_path / "notes.md").write_text("Blue.\n")
    assert main(["generate", *(argument.format(tmp_path.as_uri()) for argument in arguments)]) == 0
    assert engine.asked[0][0] == asked


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("-f", "/dev/zero", "/dev/zero is not a regular file."),
        ("-f", "fifo", "fifo is not a regular file."),
        ("-f", ".", ". cannot be read: Is a directory."),
        ("-f", "none", "none cannot be read: "),
        ("-f", "binary", "binary is not a text file."),
        ("-f", "large", "large has more than 0 MiB."),
        ("-f", "empty", "The prompt is empty."),
        ("-f", "a\0b", "'a\\x00b' is not a file name."),
        ("--system-file", "/dev/zero", "/dev/zero is not a regular file."),
        ("--json-schema", "fifo", "fifo is not a regular file."),
        ("--grammar", "/dev/zero", "/dev/zero is not a regular file."),
    ],
)
def test_what_is_no_text_file_is_refused(
    flag: str,
    name: str,
    said: str,
    engine: TalkingEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(utf8, "MAX_BYTES", 10)
    if name in ("fifo", "/dev/zero"):
        if sys.platform == "win32":
            pytest.skip("no such files there")
        os.mkfifo("fifo")
    (tmp_path / "binary").write_bytes(b"GGUF\0")
    (tmp_path / "large").write_text("x" * 11)
    (tmp_path / "empty").touch()
    assert main(["generate", flag, name, *([] if flag == "-f" else ["-p", "Hi"])]) == 2
    assert capsys.readouterr().err.startswith(f"Error: {said}")
    assert engine.loaded_with == {}


@pytest.mark.skipif(sys.platform == "win32", reason="no such files there")
def test_standard_input_is_read_up_to_a_limit(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(prompt, "_MAX_BYTES", 10)
    with Path("/dev/zero").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate"]) == 2
    assert capsys.readouterr().err.startswith("Error: Standard input has more than 0 MiB.")


@pytest.mark.skipif(sys.platform == "win32", reason="no such files there")
def test_the_output_of_a_command_is_a_file(engine: TalkingEngine) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"Why?\n")
    os.close(writer)
    assert main(["generate", "-f", f"/dev/fd/{reader}"]) == 0
    os.close(reader)
    assert engine.asked[0][0] == "Why?"


@pytest.mark.parametrize(
    ("files", "opened"),
    [
        (["m-Q4_0.gguf", "mmproj-m.gguf", "README.md"], "m-Q4_0.gguf"),
        (["M.GGUF"], "M.GGUF"),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "m-00001-of-00002.gguf"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], None),
        (["mmproj-m.gguf"], None),
        ([], None),
    ],
)
def test_a_folder_with_one_model_opens_it(files: list[str], opened: str | None, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    if opened is None:
        with pytest.raises(ModelFileError, match=r"is a folder with (no|2) GGUF models\. Name "):
            catalog.find(str(tmp_path))
        return
    for spelled in (str(tmp_path), tmp_path.as_uri()):
        assert catalog.find(spelled) == tmp_path / opened


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions there")
def test_a_folder_whose_files_may_not_be_looked_at_has_no_models() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not in the tests' own folder, which nobody else may enter
        Path(folder, "m.gguf").touch()
        Path(folder).chmod(0o444)
        with unprivileged(), pytest.raises(ModelFileError, match="is a folder with no GGUF models"):
            catalog.find(folder)
        Path(folder).chmod(0o700)


def test_a_folder_with_a_model_is_a_model(engine: TalkingEngine, tmp_path: Path, smol_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    put(smol_path, folder / "m.gguf")
    assert main(["generate", str(folder), "Hi"]) == 0
    assert engine.loaded_with["model"] == str(folder)
    assert [prompt for prompt, *_ in engine.asked] == ["Hi"]


def test_urls_of_files_are_paths(tmp_path: Path) -> None:
    assert expanded((tmp_path / "a b.gguf").as_uri()) == tmp_path / "a b.gguf"
