"""`edgespec generate --input`: lines that are answered, told and gone on with."""

from __future__ import annotations

import signal
import tracemalloc
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.cli.batch.input_file import read_jobs
from edgespec.cli.main import main
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from tests.unit.talking import ANSWER, TalkingEngine, records, write_lines


def test_lines_are_answered_in_order(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "Hm?"}]
    prompts = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "Hi", "temperature": 0.5, "stop": "x"},
        "",
        {"messages": messages, "max_tokens": 2},
    )
    assert main(["generate", "--input", str(prompts), "--top-k", "3"]) == 0
    out, err = capsys.readouterr()
    assert [(r["id"], r["prompt"], r["text"]) for r in records(out)] == [
        ("a", "Hi", "Blue as ever."),
        (3, messages, "Blue as ever."),
    ]
    assert [config for _, config, _ in engine.asked] == [
        GenerationConfig(top_k=3, temperature=0.5, stop=("x",)),
        GenerationConfig(top_k=3, max_tokens=2),
    ]
    assert err == "2 answered.\n"


def nested(depth: int) -> str:
    """A line whose schema is nested so deeply."""
    return '{"prompt": "a", "json_schema": ' + '{"items": ' * depth + "{}" + "}" * depth + "}"


BAD_LINES = {
    "{": "Invalid JSON at column 2: Expecting property name enclosed in double quotes.",
    '{"prompt": "a': "Invalid JSON at column 12: Unterminated string.",
    "[1]": 'The line is not a JSON object. For example: {"prompt": "..."}',
    "{}": 'Missing "prompt" or "messages".',
    '{"prompt": "a", "messages": []}': 'Both "prompt" and "messages" are set.',
    '{"prompt": 3}': '"prompt" must be a non-empty string.',
    '{"prompt": "\\ud800"}': "The text contains half of a surrogate pair.",
    '{"messages": []}': '"messages" must be a non-empty list.',
    '{"messages": [{"role": "boss", "content": ""}]}': "Each message must have a "
    '"role" (system, user, assistant, tool) and a string "content", and nothing else.',
    '{"prompt": "a", "temprature": 1}': "There is no field 'temprature'. Did you mean temperature?",
    '{"prompt": "a", "top_k": "few"}': "top_k must be an integer, not 'few'.",
    '{"prompt": "a", "max_tokens": 1.5}': "max_tokens must be an integer, not 1.5.",
    '{"prompt": "a", "stop": [1]}': "stop must be a list of strings, not [1].",
    '{"prompt": "a", "n": 0}': '"n" must be from 1 to 1000, not 0.',
    '{"prompt": "a", "top_p": 2}': "top_p must be above 0 and at most 1, not 2.",
    '{"prompt": "a", "id": true}': '"id" must be a string or an integer, not true.',
    '{"prompt": "a", "id": "good"}': "Duplicate id 'good' (first on line 1).",
    '{"prompt": "too long"}': "The prompt has 9 tokens. Shorten it.",
    "[" * 100_000: "The JSON is nested deeper than 200 levels.",
    nested(974): "The JSON is nested deeper than 200 levels.",
    '{"prompt": "a", "id": ' + "[" * 500 + "]" * 500 + "}": "The JSON is nested deeper than 200 levels.",
    '{"prompt": "a", "temperature": 1' + "0" * 400 + "}": "temperature must be from 0 to 100, "
    f"not 1{'0' * 78}….",
    '{"prompt": "a", "temperature": 1e999}': "temperature must be from 0 to 100, not inf.",
    '{"prompt": "a", "min_p": NaN}': "min_p must be from 0 to 1, not nan.",
    '{"prompt": "a", "seed": 1' + "0" * 5000 + "}": "A number has too many digits.",
    '{"prompt": "a", "seed": 18446744073709551616}': "seed must be from 0 to "
    "18446744073709551615, not 18446744073709551616.",
    '{"prompt": "a", "stop": "\\ud800"}': "The text contains half of a surrogate pair.",
}


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES.items(), ids=[line[:40] for line in BAD_LINES])
def test_a_bad_line_is_told_and_the_others_are_done(
    bad: str, reason: str, engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"id": "good", "prompt": "Hi"}
    prompts = write_lines(tmp_path / "in.jsonl", good, bad, good | {"id": "last"})
    assert main(["generate", "--input", str(prompts)]) == 1
    out, err = capsys.readouterr()
    assert err == f"line 2: {reason}\n2 answered, 1 failed.\n"
    assert [r["finish_reason"] for r in records(out)] == ["stop", "error", "stop"]
    assert records(out)[1]["error"] == f"line 2: {reason}"


def test_a_second_run_continues(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", *({"id": i, "prompt": f"Q{i}"} for i in "abcd"))
    done, failed = Generation(text="old").to_json("Qa", "a"), Generation(finish_reason="error")
    answers = write_lines(tmp_path / "out.jsonl", done, failed.to_json("Qb", "b"))
    with answers.open("a") as file:
        file.write('{"id": "c", "prompt": "Q')
    assert main(["generate", "--input", str(prompts), "--output", str(answers)]) == 0
    unknown = f"Some answers in {answers} lack the model, prompt and settings they were made with; "
    unknown += "they are kept as they are.\n"
    assert capsys.readouterr() == ("", f"{unknown}3 answered, 1 already done.\n")
    assert [prompt for prompt, _, _ in engine.asked] == ["Qb", "Qc", "Qd"]
    written = [(r["id"], r["text"]) for r in records(answers.read_text())]
    assert written == [("a", "old")] + [(i, "Blue as ever.") for i in "bcd"]


def test_an_interrupted_run_continues(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q1"}, {"prompt": "Q2"}, {"prompt": "Q3"})
    command = ["generate", "--input", str(prompts), "--output", str(tmp_path / "out.jsonl")]

    def interrupt(word: int) -> None:
        if len(engine.asked) == 2 and word == 1:
            signal.raise_signal(signal.SIGINT)

    engine.on_word = interrupt
    assert main(command) == 130
    assert capsys.readouterr().err == (
        "Interrupted at line 2. 1 answered. The same command continues there.\n"
    )
    engine.on_word = lambda _: None
    assert main(command) == 0
    results = records((tmp_path / "out.jsonl").read_text())
    assert [(r["id"], r["finish_reason"]) for r in results] == [(1, "stop"), (2, "stop"), (3, "stop")]


def test_a_failed_line_is_tried_again_and_has_one_result_in_its_place(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl", {"id": 1, "prompt": "too long"}, "{", {"id": 3, "prompt": "Q"}
    )
    answers = tmp_path / "out.jsonl"
    other = Generation(text="other").to_json("?", "another line")
    write_lines(answers, other)
    command = ["generate", "--input", str(prompts), "--output", str(answers)]
    for _ in range(2):
        assert main(command) == 1
        results = [(r["id"], r["finish_reason"]) for r in records(answers.read_text())]
        assert results == [("another line", "stop"), (1, "error"), (2, "error"), (3, "stop")]
    write_lines(prompts, {"id": 1, "prompt": "short"}, "{", {"id": 3, "prompt": "Q"})
    assert main(command) == 1
    assert capsys.readouterr().err.endswith("1 answered, 1 already done, 1 failed.\n")
    results = [(r["id"], r["finish_reason"]) for r in records(answers.read_text())]
    assert results == [("another line", "stop"), (1, "stop"), (2, "error"), (3, "stop")]


def test_several_answers_to_a_line(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl", {"id": "a", "prompt": "Q"}, {"prompt": "R", "n": 1, "seed": 9}
    )
    command = [
        "generate",
        "--input",
        str(prompts),
        "--output",
        str(tmp_path / "out"),
        "--n",
        "3",
        "--seed",
        "5",
    ]
    for told in ("4 answered.\n", "0 answered, 4 already done.\n"):
        assert main(command) == 0
        assert capsys.readouterr().err == told
    results = records((tmp_path / "out").read_text())
    assert [(r["id"], r.get("index")) for r in results] == [("a", 0), ("a", 1), ("a", 2), (2, None)]
    assert [config.seed for _, config, _ in engine.asked] == [5, 6, 7, 9]


def test_several_answers_to_one_prompt(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--n", "2"]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n\n{ANSWER}\n"
    assert main(["generate", "-p", "Hi", "--n", "0"]) == 2
    assert capsys.readouterr().err == "Error: --answers must be from 1 to 1000, not 0.\n"


@pytest.mark.parametrize(
    "content",
    ["my notes\n", '{"settings": 1}', '{"id": 1}\n', '"text"\n'],
    ids=["text", "json", "other", "str"],
)
def test_a_file_of_something_else_is_left_alone(
    content: str, engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "notes"
    precious.write_text(content)
    assert main(["generate", "-p", "Hi", "--output", str(precious)]) == 1
    assert precious.read_text() == content
    assert engine.loaded_with == {}
    what = f"Line 1 of {precious} is not a result."
    assert capsys.readouterr().err.startswith(f"Error: {what}\n")


def test_outputs_that_cannot_be_written(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q1"})
    reasons = {
        tmp_path / "no" / "x": f"cannot be written: there is no folder {tmp_path / 'no'}.\nCreate it first.",
        tmp_path: "cannot be written: Is a directory.\nGive another name to --output.",
        prompts: "is the input file.\nGive another name to --output.",
    }
    for path, reason in reasons.items():
        assert main(["generate", "--input", str(prompts), "--output", str(path)]) == 1
        assert capsys.readouterr() == ("", f"Error: {path} {reason}\n")
    assert engine.loaded_with == {}


def test_a_missing_input_leaves_no_output_and_a_bad_line_needs_no_model(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "out.jsonl"
    assert main(["generate", "--input", str(tmp_path / "no.jsonl"), "--output", str(answers)]) == 2
    assert not answers.exists()
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": ""}, "{")
    assert main(["generate", "--input", str(prompts), "--output", str(answers)]) == 1
    assert [r["finish_reason"] for r in records(answers.read_text())] == ["error", "error"]
    assert engine.loaded_with == {}
    assert "0 answered, 2 failed." in capsys.readouterr().err


def test_one_prompt_into_a_file(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "out.jsonl"
    for _ in range(2):
        assert main(["generate", "-p", "Hi", "--output", str(answers)]) == 0
    assert capsys.readouterr().out == ""
    assert [r["text"] for r in records(answers.read_text())] == ["Blue as ever."] * 2


def test_memory_does_not_grow_with_the_lines(
    engine: TalkingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from their ids: far less than the lines themselves take."""
    monkeypatch.setattr(engine, "asked", deque(maxlen=1))
    length, peaks = 20_000, []
    for lines in (1, 100, 400):  # the first run imports what it needs
        prompts = write_lines(tmp_path / f"{lines}.jsonl", *({"prompt": "x" * length} for _ in range(lines)))
        tracemalloc.start()
        assert main(["generate", "--input", str(prompts), "--output", str(tmp_path / f"{lines}.out")]) == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / 300 < length / 2


def test_lines_are_read_one_by_one() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b'\xef\xbb\xbf{"prompt": "Hi"}\n'

    jobs = read_jobs(endless())
    assert [next(jobs).identifier for _ in range(3)] == [1, 2, 3]
