"""`edgespec generate` after a graphics card or a worker has failed in the middle of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.cli.main import main
from edgespec.errors import DeviceLostError, DeviceMemoryError, EdgeSpecError, WorkerError
from tests.unit.talking import ANSWER, TalkingEngine, records, write_lines

Capture = pytest.CaptureFixture[str]
RELOADING = "CUDA0 failed. Reloading the model.\n"


def failing(*at: int, error: type[EdgeSpecError] = DeviceLostError) -> Callable[[int], None]:
    """Fails when these words are due, each counted from the first one of all answers."""
    said = 0

    def on_word(_: int) -> None:
        nonlocal said
        said += 1
        if said - 1 in at:
            raise error("CUDA0 failed.", "Update its driver.")

    return on_word


@pytest.mark.parametrize("error", [DeviceLostError, DeviceMemoryError, WorkerError])
def test_an_answer_is_continued_after_a_reload(
    error: type[EdgeSpecError], engine: TalkingEngine, capsys: Capture
) -> None:
    engine.on_word = failing(2, error=error)
    assert main(["generate", "-p", "Hi"]) == 0
    assert capsys.readouterr() == (ANSWER + "\n", RELOADING)
    assert len(engine.asked) == 2
    assert engine.loaded_with["leave_out_missing"] is True


def test_answers_that_are_done_stay(engine: TalkingEngine, capsys: Capture) -> None:
    engine.on_word = failing(4, 7)  # in the second answer, and when it is repeated
    assert main(["generate", "-p", "Hi", "--answers", "2", "--seed", "5"]) == 0
    assert capsys.readouterr() == (f"{ANSWER}\n\n{ANSWER}\n", 2 * RELOADING)
    assert [config.seed for _, config, _ in engine.asked] == [5, 6, 6, 6]
    engine.on_word = failing(1)
    assert main(["generate", "-p", "Hi", "--json"]) == 0
    assert [record["text"] for record in records(capsys.readouterr().out)] == [ANSWER]


@pytest.mark.parametrize("words", [["Green", " as"], ["Blu"]])
def test_a_text_that_differs_after_a_reload_is_not_mixed_with_what_was_written(
    words: list[str], engine: TalkingEngine, capsys: Capture
) -> None:
    fail = failing(1)

    def on_word(number: int) -> None:
        try:
            fail(number)
        except DeviceLostError:
            engine.words = words
            raise

    engine.on_word = on_word
    assert main(["generate", "-p", "Hi"]) == 1
    out, err = capsys.readouterr()
    assert out == "Blue"
    assert "The answer cannot be continued: the reloaded model's text differs" in err


def test_a_card_that_fails_again_and_again_ends_the_program(engine: TalkingEngine, capsys: Capture) -> None:
    engine.on_word = failing(*range(100))
    assert main(["generate", "-p", "Hi"]) == 1
    said = capsys.readouterr().err
    assert said.endswith("Error: CUDA0 failed.\nUpdate its driver.\n")
    assert said.count("Reloading") == len(engine.asked) - 1 < 10


def test_a_model_that_cannot_be_loaded_is_loaded_once(engine: TalkingEngine, capsys: Capture) -> None:
    tries = []

    def on_load(_: object) -> None:
        tries.append(1)
        raise WorkerError("Nobody answers.", "")

    engine.on_load = on_load
    assert main(["generate", "-p", "Hi"]) == 1
    assert (tries, "Reloading" in capsys.readouterr().err) == ([1], False)


@pytest.mark.parametrize("to_file", [False, True])
def test_only_unfinished_lines_of_a_batch_are_repeated(
    to_file: bool, engine: TalkingEngine, tmp_path: Path, capsys: Capture
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", *({"prompt": str(n)} for n in range(4)))
    engine.on_word = failing(4, 10)  # in the second line, and in the third
    output = tmp_path / "out.jsonl"
    more = ["--output", str(output)] if to_file else []
    assert main(["generate", "--input", str(prompts), *more]) == 0
    out, err = capsys.readouterr()
    assert [prompt for prompt, _, _ in engine.asked] == ["0", "1", "1", "2", "2", "3"]
    found = records(output.read_text("utf-8") if to_file else out)
    assert [(record["prompt"], record["text"]) for record in found] == [(str(n), ANSWER) for n in range(4)]
    assert err == f"{2 * RELOADING}4 answered.\n"


def test_a_batch_ends_after_some_reloads_and_keeps_its_answers(
    engine: TalkingEngine, tmp_path: Path, capsys: Capture
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    engine.on_word = failing(*range(3, 100))
    assert main(["generate", "--input", str(prompts)]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["a"]
    assert err.endswith("Error: CUDA0 failed.\nUpdate its driver.\n")
