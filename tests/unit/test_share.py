"""Results that are posted: nothing personal in them, and two of them side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.report.document import make_document
from edgespec.bench.report.share import compare, make_share, read_share
from edgespec.bench.rows.figures import Row, spread
from edgespec.bench.rows.runner import BenchMeasurements, DiskSpeed
from edgespec.cli.main import main
from edgespec.errors import UsageError

SECRETS = ("ann", "/home", "nvme0n1", "--session", "secret")
ABOUT: dict[str, Any] = {
    "title": "edgespec bench: big",
    "date": "2026-03-04T05:06:07+00:00",
    "command": "edgespec bench /home/ann/big.gguf --session secret",
    "asked": "2 prompts, once, at most 16 tokens each, greedy",
    "machine": {
        "cpu": "A CPU",
        "cores": 8,
        "memory_bytes": 16 * 2**30 - 12345,
        "available_bytes": 2**30,
        "disk": "NVMe nvme0n1",
        "system": "Linux-6.1.0-ann",
    },
    "versions": {"edgespec": "0.1.0", "llama-cpp-python": "0.3.36", "python": "3.11.0"},
    "model": {"name": "big", "path": "/home/ann/big.gguf", "bytes": 2**32, "widened_from": None},
    "limits": {"memory_bytes": 2**31, "cap_bytes": None, "cap": "none"},
    "draft": "/home/ann/small.gguf",
    "settings": {
        "prompts": 2,
        "workload": "/home/ann/questions.jsonl",
        "repetitions": 1,
        "row_seconds": 60.0,
        "max_tokens": 16,
        "temperature": 0.0,
        "seed": None,
        "verify": "auto",
        "trees": [16],
        "load": {"context": 512, "draft": "/home/ann/small.gguf", "lora": ["/home/ann/l.gguf"], "kv": "q8_0"},
    },
    "notes": ["/home/ann is slow."],
}


def row(name: str, speed: float, **more: Any) -> Row:
    return Row(name, "stream", 16, **{**spread([speed]), "notes": ["/home/ann"], **more})


def shared(*rows: Row) -> dict[str, Any]:
    disk = DiskSpeed("/home/ann/big.pack", [2.0e9, 2.2e9])
    return make_share(make_document(BenchMeasurements(list(rows), {}, disk), ABOUT))


def test_what_is_shared_names_nobody() -> None:
    text = json.dumps(shared(row("streamed, tree 16", 2.0), row("mapped", 1.0, error="no /home/ann")))
    assert not [secret for secret in SECRETS if secret in text]
    assert len(text) < 3000
    record = json.loads(text)
    assert record["machine"] == {
        "cpu": "A CPU",
        "cores": 8,
        "memory_gib": 16,
        "disk": "NVMe",
        "disk_bytes_per_s": [2000000000, 2200000000],
        "system": "Linux",
    }
    assert (record["drafter"], record["month"]) == ("small", "2026-03")
    assert record["settings"]["kv"] == "q8_0"
    assert (record["settings"]["adapters"], record["settings"]["own_workload"]) == (1, True)
    assert [(r["name"], r["tokens_per_second"]) for r in record["rows"]] == [("streamed, tree 16", 2.0)]


def test_two_results_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, theirs = shared(row("plain", 2.0), row("tree 16", 4.0)), shared(row("tree 16", 6.0), row("x", 1.0))
    theirs["machine"]["cores"] = 16
    for name, record in (("mine", mine), ("theirs", theirs)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert main(["bench", "--compare", str(tmp_path / "mine.json"), str(tmp_path / "theirs.json")]) == 0
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert lines[0] == ["", "mine", "theirs"]
    assert ["processor", "A CPU, 8 cores", "A CPU, 16 cores"] in lines
    assert ["model", "big, 4.0 GiB", "the same"] in lines
    assert ["tokens/s", "mine", "theirs", "ratio"] in lines
    assert ["plain", "2.00", "", ""] in lines
    assert ["tree 16", "4.00", "6.00", "1.50x"] in lines
    assert ["x", "", "1.00", ""] in lines


def test_hostile_names_stay_in_their_cells() -> None:
    record = shared(row("a", 1.0))
    record["rows"][0]["name"] = "a | b\n\x1b[2J"
    assert "| a / b[2J" in compare(record, record, ["one", "two"])
    assert "\x1b" not in compare(record, record, ["one", "two"])


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"edgespec_bench": 2}', '{"edgespec_bench": 1}', "[" * 9999]
)
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=r"a\.json is not a file of 'edgespec bench --share'"):
        read_share(tmp_path / "a.json")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    for part in ("machine", "versions", "model", "limits", "settings", "rows"):
        record = shared(row("a", 1.0))
        record[part] = "?"
        (tmp_path / "a.json").write_text(json.dumps(record))
        with pytest.raises(UsageError, match="is not a file of"):
            read_share(tmp_path / "a.json")


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(tmp_path / "one.json")
    assert main(["bench", "--compare", one]) == 2
    assert f"Cannot compare {one} alone.\nName two files: --compare A B" in capsys.readouterr().err
    assert main(["bench", "--compare", one, one]) == 2
    assert f"{one} cannot be read: No such file or directory." in capsys.readouterr().err
    assert main(["bench", "--share", str(tmp_path / "no" / "a.json")]) == 1
    assert "there is no folder" in capsys.readouterr().err
