"""The options of `edgespec bench`, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.commands.bench import _conditions
from edgespec.cli.main import main, with_bare_json


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--tree-budget", "many"], "--tree-budget must be from 1 to 4096 or auto, not 'many'."),
        (["--repetitions", "0"], "--repetitions must be "),
        (["--prompts", "0"], "--prompts must be "),
        (["--row-seconds", "0"], "--row-seconds must be "),
        (["--max-tokens", "0"], "--max-tokens must be 1 or more, not 0"),
        (["--compare", "none.json"], "Cannot compare none.json alone."),
        (["--offload", "gpu"], "--offload must be auto, stream, mmap or none, not 'gpu'."),
        (["--workload", "none.jsonl"], "none.jsonl cannot be read: No such file or directory."),
        (["--temperature", "-1"], "--temperature must be from 0 to 100, not -1."),
        (["--parallel", "4,many"], "--parallel is '4,many'. Give numbers of texts, such as 1,4,16,64."),
        (["--parallel", "4,0"], "--parallel must be from 1 to 256, not 0."),
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


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_noticed_first(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", flag, str(tmp_path / "none" / "file.md")]) == 1
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())


def test_the_setup_is_told_in_one_sentence() -> None:
    document = {
        "model": {"name": "big"},
        "draft": "small",
        "asked": "3 prompts",
        "settings": {"memory_bytes": 2 << 30},
        "disk": {"bytes_per_s": [1 << 30]},
        "versions": {"edgespec": "1.0", "python": "3.11"},
    }
    assert _conditions(document) == (
        "Test setup: big; drafter small; 3 prompts; memory budget 2.0 GiB; disk 1.0 GiB/s; edgespec 1.0."
    )
