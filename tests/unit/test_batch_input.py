"""What people give to --input: JSON Lines, columns of their own, and files of other kinds."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.batch import input_file
from edgespec.cli.batch.input_file import open_input, read_jobs
from edgespec.cli.main import main
from edgespec.errors import UsageError
from tests.unit.talking import TalkingEngine, records

Capture = pytest.CaptureFixture[str]
TWO = [{"id": "a", "prompt": "Q"}, {"id": "b", "prompt": "R"}]
LINES = "".join(json.dumps(line) + "\n" for line in TWO).encode()


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], list[Any]]:
    def objects(data: bytes) -> list[Any]:
        (tmp_path / "in").write_bytes(data)
        with open_input(str(tmp_path / "in")) as source:
            return [json.loads(line.decode("utf-8-sig")) for line in source.lines]

    return objects


@pytest.mark.parametrize("data", [LINES, codecs.BOM_UTF8 + LINES], ids=["lines", "mark"])
def test_lines_are_read(data: bytes, read: Any) -> None:
    assert read(data) == TWO


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"id,prompt\n1,Hello\n", "is not JSON Lines"),
        (b"PAR1\x15\x04", "is not JSON Lines"),
        ("Name\u00e9 a colour.\n".encode(), r"jq -c '\.\[\]'"),
        (LINES.decode().encode("utf-16"), "is UTF-16"),
        (b'{\n  "prompt": "Q"\n}\n', "jq -c ."),
        (json.dumps(TWO).encode(), "is not JSON Lines"),
        (gzip.compress(LINES, mtime=0), "zcat"),
    ],
)
def test_what_is_no_input_is_refused_before_a_model_is_loaded(
    data: bytes, said: str, engine: TalkingEngine, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "in"
    path.write_bytes(data)
    assert main(["generate", "--input", str(path), "--output", str(tmp_path / "out")]) == 2
    what, hint = capsys.readouterr().err.splitlines()
    with pytest.raises(UsageError, match=said):
        raise UsageError(what, hint)
    assert engine.loaded_with == {}


def test_a_line_that_is_larger_than_memory_is_not_read(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "MAX_LINE", 10)
    with pytest.raises(UsageError, match="more than 0 MiB"):
        read(LINES)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="POSIX")
def test_a_device_and_a_folder_are_refused(engine: TalkingEngine, tmp_path: Path, capsys: Capture) -> None:
    assert main(["generate", "--input", "/dev/zero"]) == 2
    assert "is not JSON Lines" in capsys.readouterr().err
    assert main(["generate", "--input", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_an_empty_input_loads_no_model(
    data: bytes, engine: TalkingEngine, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "in").write_bytes(data)
    assert main(["generate", "--input", str(tmp_path / "in")]) == 0
    assert capsys.readouterr().err == "The input has no lines.\n0 answered.\n"
    assert engine.loaded_with == {}


@pytest.mark.parametrize(("data", "answered"), [(b"", 0), (LINES, 2)])
def test_a_pipe_is_looked_at_too(
    data: bytes,
    answered: int,
    engine: TalkingEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-").touch()  # which is not what "-" means
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", "--input", "-"]) == 0
    out, err = capsys.readouterr()
    assert (len(records(out)), bool(engine.loaded_with)) == (answered, answered > 0)
    assert err.endswith(f"{answered} answered.\n")


def test_further_columns_are_kept_and_told_once(
    run: Callable[..., tuple[int, str]], answers: Path, engine: TalkingEngine
) -> None:
    lines = [
        {"id": "a", "prompt": "Q", "category": "x", "model": "gpt-4o", "label": None},
        {"id": "b", "prompt": "R", "reference": ["S"], "top_k": 0.5},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "T"}, "split": 1},
        {"id": "d", "prompt": "U"},
    ]
    code, err = run(lines)
    assert (code, err.count("columns")) == (1, 1)
    assert err.startswith(
        "line 1: Fields without effect are kept as \"columns\": 'category', 'model', 'label'."
    )
    a, b, c, d = records(answers.read_text())
    assert a["columns"] == {"category": "x", "model": "gpt-4o", "label": None}
    assert (b["finish_reason"], b["columns"]) == ("error", {"reference": ["S"]})
    assert c["edgespec"]["columns"] == {"split": 1}
    assert "columns" not in d
    changed = [lines[0] | {"category": "y"}, lines[3]]
    assert run(changed)[1].endswith("0 answered, 2 already done.\n")


@pytest.mark.parametrize("name", ["temprature", "message", "tools", "top"])
def test_slips_of_names_are_no_columns(
    name: str, run: Callable[..., tuple[int, str]], engine: TalkingEngine
) -> None:
    code, err = run([{"prompt": "Q", name: 1}])
    assert (code, engine.asked) == (1, [])
    assert f"There is no field '{name}'." in err


def test_null_is_not_given_and_minus_one_has_its_usual_meaning(
    run: Callable[..., tuple[int, str]], engine: TalkingEngine
) -> None:
    nothing = dict.fromkeys(("id", "messages", "images", "n", "temperature", "stop", "json_schema", "top_k"))
    assert run([nothing | {"prompt": "Q"}, {"prompt": "R", "max_tokens": -1, "seed": -1}], "-n", "5")[0] == 0
    first, second = (config for _, config, _ in engine.asked)
    assert (first.max_tokens, first.temperature, first.stop) == (5, 0.0, ())
    assert (second.max_tokens, second.seed) == (None, None)


def test_a_line_that_is_nested_too_deep_fails_alone(tmp_path: Path) -> None:
    deep = "[" * 500 + "]" * 500
    file = tmp_path / "in.json"
    file.write_text(f'{{"prompt": "a", "metadata": {deep}}}\n{{"prompt": "b"}}\n')
    with open_input(str(file)) as found:
        jobs = list(read_jobs(found.lines))
    assert "nested deeper" in jobs[0].error
    assert not jobs[1].error
