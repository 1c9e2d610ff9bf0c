"""The options of `edgespec bench`, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.bench.rows.synthetic import remove_leftovers
from edgespec.cli.commands.bench import _conditions
from edgespec.cli.main import main
from edgespec.cli.options.rows import form_and_file, with_bare_json
from edgespec.files.writing import open_locked


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--tree-budget", "many"], "--tree-budget must be from 1 to 4096 or auto, not 'many'."),
        (["--repetitions", "0"], "--repetitions must be "),
        (["--prompts", "0"], "--prompts must be "),
        (["--row-seconds", "0"], "--row-seconds must be "),
        (["--max-tokens", "0"], "--max-tokens must be 1 or more, not 0"),
        (["--memory-cap", "lots"], "'lots' is not a size."),
        (["--memory", "2GiB", "--memory-cap", "1GiB"], "--memory is 2.0 GiB, and --memory-cap 1.0 GiB."),
        (["--keep"], "--keep applies only to --synthesize."),
        (["--offload", "gpu"], "--offload must be auto, stream, mmap or none, not 'gpu'."),
        (["-o", "xml"], "There is no output format 'xml'."),
        (["-o", "csv", "--json", "-"], "Standard output cannot be both csv and a JSON document."),
        (["--workload", "none.jsonl"], "none.jsonl cannot be read: No such file or directory."),
        (["--compare", "llama.cpp=/none"], "/none does not exist."),
        (["--temperature", "-1"], "--temperature must be from 0 to 100, not -1."),
        (["--parallel", "4,many"], "--parallel is '4,many'. Give numbers of texts, such as 1,4,16,64."),
        (["--parallel", "4,0"], "--parallel must be from 1 to 256, not 0."),
        (["--held", "25,half"], "--held is '25,half'. Give percents, such as 25,50,75."),
        (["--held", "100"], "--held must be from 1 to 99, in percent, not 100."),
        (["-o", "rows.xml"], "or a file name that ends in one of them."),
        (["-o", "big.gguf"], "There is no output format 'big.gguf'."),
        (
            ["--json", "big.gguf"],
            "big.gguf is a model and would be overwritten. Name the model with -m: -m big.gguf",
        ),
        (["a.gguf", "-m", "b.gguf"], "Two models were named: a.gguf and b.gguf."),
    ],
)
def test_refusals(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert what in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        ("bench --json", "bench --json -"),
        ("bench --json -m x.gguf", "bench --json - -m x.gguf"),
        ("bench --json rows.json", "bench --json rows.json"),
        ("bench --json -", "bench --json -"),
        ("generate --json", "generate --json"),
    ],
)
def test_json_without_a_file_is_standard_output(words: str, same_as: str) -> None:
    assert with_bare_json(words.split()) == same_as.split()


def test_the_ending_of_a_file_is_the_format_of_its_rows(tmp_path: Path) -> None:
    assert form_and_file("csv") == ("csv", None)
    assert form_and_file("rows.CSV") == ("csv", "rows.CSV")


@pytest.mark.parametrize("flag", ["--json", "--html", "-o"])
def test_a_file_that_cannot_be_written_is_noticed_first(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", flag, str(tmp_path / "none" / "file.md")]) == 1
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())


def test_a_disk_that_is_too_small_is_noticed_first(
    smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--synthesize", "4096TiB"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "A widened target of 4096.0 TiB and its packed file need 8192.0 TiB of disk" in err
    assert main(["bench", "--synthesize", "1MiB"]) == 2
    assert "more than the 1.0 MiB of --synthesize." in " ".join(capsys.readouterr().err.split())


def test_a_dense_model_has_no_rows_of_experts(smol_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(smol_path), "--draft", "none", "--held", "25"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"{smol_path.name} does not stream single experts." in err


def test_what_killed_benchmarks_left_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    ours = os.getpid()
    for owner in (gone.pid, ours):
        (tmp_path / f"q4_0-for-{owner}-abc").mkdir()
        (tmp_path / f"q4_0-for-{owner}-abc" / "model.gguf").write_bytes(b"x")
    (tmp_path / f"a-widened-1-for-{gone.pid}.gguf.partial").write_bytes(b"x")
    with open_locked(tmp_path / f"a-widened-1-for-{ours}.gguf.partial"):
        remove_leftovers(tmp_path)
        left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"a-widened-1-for-{ours}.gguf.partial", f"q4_0-for-{ours}-abc"]


def test_the_setup_is_told_in_one_sentence() -> None:
    document = {
        "model": {"name": "big"},
        "draft": "small",
        "asked": "3 prompts",
        "limits": {"cap_bytes": None, "cap": "none", "memory_bytes": 2 << 30},
        "disk": {"bytes_per_s": [1 << 30]},
        "versions": {"edgespec": "1.0", "python": "3.11"},
    }
    assert _conditions(document) == (
        "Test setup: big; drafter small; 3 prompts; memory budget 2.0 GiB; disk 1.0 GiB/s; edgespec 1.0."
    )
