"""Batches shared out among runs: each line is answered by one shard, and the parts make up the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli.batch.job import Job, Shard
from edgespec.cli.main import main
from edgespec.errors import UsageError
from tests.tiny_adapters import write_adapter
from tests.unit.talking import TalkingEngine, records, write_lines

Run = Callable[..., tuple[int, str]]

LINES: list[Any] = [
    {"id": "a", "prompt": "Q"},
    {"prompt": "R", "n": 2},
    {"id": "c", "prompt": "S"},
    {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "T"}},
    {"prompt": "U"},
]


@given(st.integers(0, 50), st.integers(1, 12))
def test_shards_have_every_line_once(total: int, count: int) -> None:
    jobs = [Job(line, line) for line in range(1, total + 1)]
    shards = [Shard(number, count) for number in range(1, count + 1)]
    shares = [list(shard.jobs(jobs)) for shard in shards]
    assert sorted((job for share in shares for job in share), key=lambda job: job.line) == jobs
    assert [len(share) for share in shares] == [shard.lines(total) for shard in shards]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_shard_is_written_as_a_fraction() -> None:
    assert Shard.parse("2/8") == Shard(2, 8)
    assert Shard.parse(" 1 / 1 ") == Shard(1, 1)


@pytest.mark.parametrize("text", ["", "2", "0/8", "9/8", "2/0", "-1/2", "a/b", "1/2/3", "²/3"])
def test_other_shards_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard is"):
        Shard.parse(text)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", *LINES[:2], "", *LINES[2:])


@pytest.fixture
def shard(engine: TalkingEngine, tmp_path: Path, prompts: Path) -> Callable[..., Path]:
    def answer(number: int, *flags: str, code: int = 0, into: str = "part") -> Path:
        part = tmp_path / f"{into}-{number}.jsonl"
        command = ["generate", "--input", str(prompts), "--shard", f"{number}/2", "--output", str(part)]
        assert main([*command, *flags]) == code
        return part

    return answer


@pytest.fixture
def merge(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def join(*parts: Path, flags: tuple[str, ...] = ()) -> tuple[int, str]:
        capsys.readouterr()
        command = [
            "merge",
            *map(str, parts),
            "--input",
            str(prompts),
            "--output",
            str(tmp_path / "all.jsonl"),
        ]
        code = main([*command, *flags])
        return code, capsys.readouterr().err

    return join


def test_merged_parts_are_what_one_run_gives(
    shard: Callable[..., Path], merge: Run, prompts: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.jsonl"
    assert main(["generate", "--input", str(prompts), "--output", str(whole)]) == 0
    first, second = shard(1), shard(2)
    assert len(records(first.read_text())) == 3
    assert merge(second, first) == (0, f"{tmp_path / 'all.jsonl'}: 6 answered, from 2 parts.\n")

    def answers(path: Path) -> list[Any]:
        return [
            (r.get("id") if "custom_id" not in r else r["custom_id"], r.get("index"), r.get("text"))
            for r in records(path.read_text())
        ]

    assert answers(tmp_path / "all.jsonl") == answers(whole)
    # What was merged is a batch like any other: nothing is left to do.
    assert main(["generate", "--input", str(prompts), "--output", str(tmp_path / "all.jsonl")]) == 0
    assert len(records((tmp_path / "all.jsonl").read_text())) == 6


def test_missing_lines_are_named_and_nothing_is_written(
    shard: Callable[..., Path], merge: Run, tmp_path: Path, prompts: Path
) -> None:
    part = shard(1)
    code, err = merge(part)
    assert code == 2
    assert f"2 lines of {prompts} have no complete result: 2, 5." in err
    assert "Run the unfinished shards again" in err
    assert not (tmp_path / "all.jsonl").exists()
    # A last line that a killed run left incomplete is no result.
    other = shard(2)
    other.write_bytes(other.read_bytes()[:-10])
    assert "1 line of" in merge(part, other)[1]
    assert shard(2) == other
    assert merge(part, other)[0] == 0


def test_parts_that_contradict_each_other_are_refused(shard: Callable[..., Path], merge: Run) -> None:
    first, warmer = shard(1), shard(1, "--temperature", "0.5", into="warm")
    code, err = merge(first, warmer, shard(2))
    assert code == 2
    assert f"{first} and {warmer} answer 'a' with different models, prompts or settings." in err


def test_parts_of_different_models_are_refused(shard: Callable[..., Path], merge: Run) -> None:
    first, second = shard(1), shard(2)
    changed = []
    for record in records(second.read_text()):
        made_with = record.get("edgespec", record)
        made_with["fingerprint"]["model"] = "0" * 16
        changed.append(json.dumps(record))
    second.write_text("\n".join(changed) + "\n")
    code, err = merge(first, second)
    assert code == 2
    assert "were written with different models" in err


def test_parts_with_and_without_an_adapter_are_refused(
    shard: Callable[..., Path], merge: Run, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter.gguf")
    code, err = merge(shard(1), shard(2, "--lora", str(adapter)))
    assert code == 2
    assert "were written with different adapters, cache types or contexts." in err


def test_failures_are_merged_too_and_give_way_to_answers(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "Q"}, "{")
    parts = [tmp_path / f"{number}.jsonl" for number in (1, 2)]
    for number, part in enumerate(parts, start=1):
        command = ["generate", "--input", str(prompts), "--shard", f"{number}/2", "--output", str(part)]
        assert main(command) == number - 1
    failure = {"id": "a", "finish_reason": "error", "error": "line 1: the disk failed"}
    parts[1].write_text(json.dumps(failure) + "\n" + parts[1].read_text())
    joined = tmp_path / "all.jsonl"
    assert main(["merge", *map(str, parts), "--input", str(prompts), "--output", str(joined), "--json"]) == 1
    out, err = capsys.readouterr()
    assert records(out)[-1] == {"output": str(joined), "answered": 1, "failed": 1}
    assert [record["finish_reason"] for record in records(joined.read_text())] == ["stop", "error"]
    assert "1 answered, 1 failed" in err


def test_results_of_other_inputs_are_left_out(shard: Callable[..., Path], merge: Run, tmp_path: Path) -> None:
    first, second = shard(1), shard(2)
    other = json.dumps({"id": "zz", "finish_reason": "stop", "text": "?"})
    first.write_text(first.read_text() + other + "\n")
    code, err = merge(first, second)
    assert code == 0
    assert "Left out 1 result for lines that" in err
    assert "zz" not in (tmp_path / "all.jsonl").read_text()


def test_wrong_files_are_told(shard: Callable[..., Path], merge: Run, prompts: Path, tmp_path: Path) -> None:
    part = shard(1)
    assert "cannot be read: No such file" in merge(part, tmp_path / "none.jsonl")[1]
    assert f"Line 1 of {prompts} is not a result." in merge(part, prompts)[1]
    (tmp_path / "all.jsonl").write_text("mine\n")
    code, err = merge(part, shard(2))
    assert code == 1
    assert "all.jsonl exists." in err
    assert (tmp_path / "all.jsonl").read_text() == "mine\n"
    assert merge(part, shard(2), flags=("--overwrite",))[0] == 0


def test_the_output_is_no_part(shard: Callable[..., Path], prompts: Path) -> None:
    part = shard(1)
    before = part.read_bytes()
    command = ["merge", str(part), "--input", str(prompts), "--output", str(part), "--overwrite"]
    assert main(command) == 2
    assert part.read_bytes() == before


def test_shard_is_for_batches(engine: TalkingEngine) -> None:
    assert main(["generate", "-p", "Hello", "--shard", "1/2"]) == 2
