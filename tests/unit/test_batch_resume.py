"""Resuming a batch: answers that still count, answers made with other settings, ids that occur twice."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.main import main
from edgespec.engine.requests import Event, RequestList
from edgespec.errors import InconclusiveTrial
from edgespec.models.gguf.layers import ModelFiles
from tests.tiny_adapters import write_adapter
from tests.unit.talking import ANSWER, TalkingEngine, records

Run = Callable[..., tuple[int, str]]


TWO = [{"id": "a", "prompt": "Q"}, {"id": "b", "prompt": "R"}]


def test_each_result_says_what_it_was_made_with(run: Run, answers: Path, smol_path: Path) -> None:
    assert run([TWO[0], {"prompt": "R", "temperature": 0.5, "stop": "x"}, "{"], "--seed", "7")[0] == 1
    first, second, broken = records(answers.read_text())
    assert first["model"] == second["model"] == smol_path.name
    assert first["settings"] == {"seed": 7}
    assert second["settings"] == {"seed": 7, "temperature": 0.5, "stop": ["x"]}
    assert first["fingerprint"].keys() == {"model", "prompt", "settings"}
    assert first["fingerprint"]["model"] == second["fingerprint"]["model"]
    assert all(len(part) == 16 for part in first["fingerprint"].values())
    assert (broken["model"], broken["settings"], broken["fingerprint"]) == (None, None, None)


@pytest.mark.parametrize(
    ("flags", "lines", "difference"),
    [
        (["--temperature", "0.7"], TWO, "temperature was 0.0 and is now 0.7"),
        (
            ["--max-tokens", "9", "--raw"],
            TWO,
            "max_tokens was none and is now 9; raw was false and is now true",
        ),
        (["--system", "Be brief."], TWO, "the prompt or the system prompt differs"),
        (
            [],
            [TWO[0] | {"prompt": "X"}, TWO[1] | {"prompt": "Y"}],
            "the prompt or the system prompt differs",
        ),
    ],
    ids=["temperature", "two", "system", "prompt"],
)
def test_a_run_with_something_else_is_refused_before_a_model_is_loaded(
    flags: list[str], lines: list[Any], difference: str, run: Run, answers: Path, engine: TalkingEngine
) -> None:
    assert run(TWO)[0] == 0
    before = answers.read_bytes()
    code, err = run(lines, *flags)
    assert (code, engine.loaded_with, answers.read_bytes()) == (2, {}, before)
    what = f"{answers} has 2 answers made with different settings, starting at line 1: {difference}."
    hint = "Give another name to --output, or --overwrite to answer such lines again."
    assert err == f"Error: {what}\n{hint}\n"
    assert run(lines, *flags, "--overwrite") == (0, "2 answered.\n")
    assert [r["id"] for r in records(answers.read_text())] == ["a", "b"]
    assert run(lines, *flags) == (0, "0 answered, 2 already done.\n")


def test_another_model_is_refused_and_the_same_one_elsewhere_is_not(
    run: Run, answers: Path, engine: TalkingEngine, smol_path: Path, gemma_path: Path, tmp_path: Path
) -> None:
    assert run(TWO)[0] == 0
    code, err = run(TWO, "-m", str(gemma_path))
    assert (code, engine.loaded_with) == (2, {})
    assert f"starting at line 1: the model was {smol_path.name} and is now {gemma_path.name}." in err
    moved = shutil.copy(smol_path, tmp_path / "moved.gguf")
    assert run(TWO, "-m", str(moved)) == (0, "0 answered, 2 already done.\n")


def test_other_weights_behind_the_same_header_are_another_model(
    run: Run, engine: TalkingEngine, smol_path: Path, tmp_path: Path
) -> None:
    model = shutil.copy(smol_path, tmp_path / "model.gguf")
    assert run(TWO, "-m", str(model))[0] == 0
    with model.open("r+b") as file:
        file.seek(model.stat().st_size // 2)
        file.write(bytes(4 << 20))
    code, err = run(TWO, "-m", str(model))
    assert (code, engine.loaded_with) == (2, {})
    assert "starting at line 1: the model is a different model.gguf." in err


@pytest.mark.parametrize("before", [(), ("first.gguf:0.5",), ("other.gguf",)], ids=["none", "scale", "file"])
def test_other_adapters_are_refused(
    before: tuple[str, ...], run: Run, engine: TalkingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "first.gguf")
    write_adapter(tmp_path / "other.gguf", seed=1)
    assert run(TWO, *(word for name in before for word in ("--lora", name)))[0] == 0
    code, err = run(TWO, "--lora", "first.gguf")
    assert (code, engine.loaded_with) == (2, {})
    assert "starting at line 1: lora was " in err
    assert run(TWO, "--lora", "first.gguf", "--overwrite")[0] == 0
    assert run(TWO, "--lora", "first.gguf") == (0, "0 answered, 2 already done.\n")
    write_adapter(tmp_path / "first.gguf", seed=2)  # trained on: the same header
    assert run(TWO, "--lora", "first.gguf")[0] == 2


def test_another_type_of_the_cache_is_refused(run: Run, answers: Path) -> None:
    assert run(TWO)[0] == 0
    assert "starting at line 1: kv was f16 and is now q8_0." in run(TWO, "--kv", "q8_0")[1]
    assert run(TWO, "--kv", "q8_0", "--overwrite")[0] == 0
    assert records(answers.read_text())[0]["settings"] == {"kv": "q8_0"}


def test_the_context_counts_where_it_changes_the_text(
    run: Run, engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelFiles, "depends_on_context", True)
    assert run(TWO)[0] == 0
    assert "starting at line 1: context was 4096 and is now 2048." in run(TWO, "--context", "2048")[1]


def test_a_line_that_could_not_be_tried_is_tried_again_and_ends_no_other(
    run: Run, answers: Path, engine: TalkingEngine
) -> None:
    def fail(_word: int) -> None:
        if len(engine.asked) == 1:
            raise InconclusiveTrial("Reading Image 1", "was killed by SIGKILL")

    engine.on_word = fail
    code, err = run(TWO)
    assert (code, engine.closed) == (1, True)
    assert err.startswith("line 1: Reading Image 1: the trial was inconclusive, as its process was killed")
    assert err.endswith("1 answered, 1 failed.\n")
    assert [r["finish_reason"] for r in records(answers.read_text())] == ["error", "stop"]
    engine.on_word = lambda _: None
    assert run(TWO) == (0, "1 answered, 1 already done.\n")
    assert [r["finish_reason"] for r in records(answers.read_text())] == ["stop", "stop"]


def test_only_what_differs_is_answered_again(run: Run, answers: Path, engine: TalkingEngine) -> None:
    assert run(TWO)[0] == 0
    engine.words = ["Green."]
    lines = [TWO[0], TWO[1] | {"top_k": 3}]
    code, err = run(lines)
    assert code == 2
    assert "has an answer made with different settings, at line 2: top_k was 0 and is now 3." in err
    assert run(lines, "--overwrite") == (0, "1 answered, 1 already done.\n")
    assert [(r["id"], r["text"]) for r in records(answers.read_text())] == [("a", ANSWER), ("b", "Green.")]


def test_what_the_answer_does_not_depend_on_may_change(run: Run, engine: TalkingEngine) -> None:
    assert run(TWO)[0] == 0
    flags = ["--context", "2048", "--threads", "1", "--draft", "none"]
    assert run(TWO, *flags) == (0, "0 answered, 2 already done.\n")


def test_lines_from_a_pipe_are_compared_as_they_come(
    run: Run, answers: Path, engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(TWO)[0] == 0
    lines = (tmp_path / "in.jsonl").read_bytes()
    for flags, code in (([], 0), (["--top-k", "5"], 2), (["--top-k", "5", "--overwrite"], 0)):
        reader = tmp_path / "pipe"
        reader.write_bytes(lines)
        with reader.open(encoding="utf-8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(["generate", "--input", "-", "--output", str(answers), *flags]) == code


def test_the_second_line_with_an_id_is_refused_and_the_first_keeps_its_answer(
    run: Run, answers: Path, engine: TalkingEngine
) -> None:
    lines = [TWO[0], {"id": "a", "prompt": "again"}, TWO[1]]
    said = "line 2: Duplicate id 'a' (first on line 1).\n"
    expected = [("a", ANSWER, None), ("a", "", 1), ("b", ANSWER, None)]
    for told in ("2 answered, 1 failed.\n", "0 answered, 2 already done, 1 failed.\n"):
        assert run(lines) == (1, said + told)
        results = records(answers.read_text())
        assert [(r["id"], r["text"], r.get("duplicate_of")) for r in results] == expected
    assert results[1]["error"] == said.strip()
    # The id corrected: there is nothing left of the error.
    assert run([TWO[0], TWO[1]]) == (0, "0 answered, 2 already done.\n")
    assert [r["id"] for r in records(answers.read_text())] == ["a", "b"]


def test_invalid_lines_with_one_id_keep_a_result_each(run: Run, answers: Path) -> None:
    lines = [{"id": "a", "top_k": 3}, {"id": "a", "top_p": 3}, TWO[1]]
    for _ in range(2):
        assert run(lines)[0] == 1
        results = records(answers.read_text())
        assert [(r["id"], r["finish_reason"]) for r in results] == [
            ("a", "error"),
            ("a", "error"),
            ("b", "stop"),
        ]


def test_a_line_that_fails_now_does_not_take_away_its_answer(run: Run, answers: Path) -> None:
    assert run(TWO)[0] == 0
    code, err = run([TWO[0] | {"top_p": 7}, TWO[1]])
    assert (code, err.splitlines()[1]) == (1, "0 answered, 1 already done, 1 failed.")
    assert [(r["id"], r["text"]) for r in records(answers.read_text())] == [("a", ANSWER), ("b", ANSWER)]
    assert run([TWO[0] | {"prompt": "too long"}, TWO[1]], "--overwrite")[0] == 1
    assert [(r["id"], r["text"]) for r in records(answers.read_text())] == [("a", ANSWER), ("b", ANSWER)]


def test_a_failure_nobody_thought_of_ends_one_line_only(
    run: Run, answers: Path, engine: TalkingEngine
) -> None:
    def fail(_word: int) -> None:
        if len(engine.asked) == 1:
            raise OverflowError("too large")

    engine.on_word = fail
    code, err = run(TWO)
    assert (code, err) == (
        1,
        "line 1: This is a bug in EdgeSpec: OverflowError: too large\n1 answered, 1 failed.\n",
    )
    assert [r["finish_reason"] for r in records(answers.read_text())] == ["error", "stop"]


def test_a_bug_among_answers_that_share_passes_ends_one_of_them_only(
    run: Run, answers: Path, engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = engine.stream_many

    def together(source: Any, *, parallel: int | None = None) -> Iterator[Event]:
        requests = RequestList(source) if isinstance(source, list) else source
        taken = [request for request in (requests.pop() for _ in range(3)) if request]
        if any(request.prompt == "poison" for request in taken):
            raise OverflowError("too large")
        yield from one_by_one(RequestList(taken))
        yield from one_by_one(requests)

    monkeypatch.setattr(engine, "stream_many", together)
    lines = [{"prompt": text} for text in ("Q", "poison", "R", "S")]
    code, err = run(lines)
    said = "line 2: This is a bug in EdgeSpec: OverflowError: too large\n3 answered, 1 failed.\n"
    assert (code, err) == (1, said)
    assert [r["text"] for r in records(answers.read_text())] == [ANSWER, "", ANSWER, ANSWER]


def test_unordered_results_stay_where_they_are_and_new_ones_replace_old_ones(run: Run, answers: Path) -> None:
    failing = {"id": "c", "prompt": "too long"}
    assert run([failing, TWO[1]], "--unordered")[0] == 1
    lines = [TWO[0], TWO[1], {"id": "c", "prompt": "short"}]
    assert run(lines, "--unordered") == (0, "2 answered, 1 already done.\n")
    results = records(answers.read_text())
    assert [(r["id"], r["finish_reason"]) for r in results] == [("b", "stop"), ("a", "stop"), ("c", "stop")]
    assert run(lines) == (0, "0 answered, 3 already done.\n")
    assert [r["id"] for r in records(answers.read_text())] == ["a", "b", "c"]


def test_overwrite_needs_a_batch(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--overwrite"]) == 2
    assert capsys.readouterr().err.startswith("Error: --overwrite needs --input and --output.\n")


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_of_ones_own_is_not_taken_for_half_a_result(run: Run, answers: Path, end: str) -> None:
    own = '{"id": 1, "prompt": "my own line"}' + end
    answers.write_text(own)
    code, err = run(TWO)
    assert (code, err.splitlines()[0]) == (1, f"Error: Line 1 of {answers} is not a result.")
    assert answers.read_text() == own


@pytest.mark.parametrize(
    "record", ['{"id": [], "finish_reason": "stop"}', '{"id": "a", "finish_reason": "stop", "index": 1e999}']
)
def test_results_of_something_else_are_no_bug(
    record: str, run: Run, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.write_text(record + "\n")
    code, err = run(TWO)
    assert (code, err.splitlines()[0]) == (
        1,
        f"Error: Line 1 of {answers} is not a result.",
    )
