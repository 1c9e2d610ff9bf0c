"""`edgespec generate --score`: a line of scores for each line of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.cli.main import main
from edgespec.engine.engine import Engine
from tests.unit.talking import records, write_lines

QUESTION = "Tea was first drunk in the south-west of China. Where?"
CHOICES = [" In China.", " In Norway, some say", " Nowhere"]
LINES: list[Any] = [
    {"id": "whole", "prompt": "Tea is hot"},
    {"id": "one", "prompt": QUESTION, "completion": CHOICES[1], "logprobs": 1},
    {"prompt": QUESTION, "choices": CHOICES},
    {"messages": [{"role": "user", "content": "Tea?"}], "completion": "Yes."},
]


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(short_path, draft="none", exact=True, context=256, threads=1) as engine:
        yield engine


@pytest.fixture
def command(short_path: Path, tmp_path: Path) -> list[str]:
    options = ["--context", "256", "--draft", "none", "--exact", "--threads", "1"]
    return ["generate", str(short_path), "--input", str(tmp_path / "in.jsonl"), "--score", *options]


def test_each_line_has_its_scores(
    engine: Engine, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", *LINES)
    assert main(command) == 0
    out, err = capsys.readouterr()
    whole, one, several, chat = records(out)
    assert err.endswith("4 scored.\n")
    (expected,) = engine.score(["Tea is hot"])
    assert (whole["id"], whole["logprob"], whole["tokens"]) == (
        "whole",
        expected.logprob,
        len(expected.tokens),
    )
    assert "token_logprobs" not in whole
    scores = engine.score([QUESTION] * 3, CHOICES, top=1)
    assert (one["completion"], one["logprob"]) == (CHOICES[1], scores[1].logprob)
    assert [item["id"] for item in one["token_logprobs"]] == list(scores[1].tokens)
    assert all(len(item["top_logprobs"]) == 1 for item in one["token_logprobs"])
    assert (several["id"], [choice["text"] for choice in several["choices"]]) == (3, CHOICES)
    assert [choice["logprob"] for choice in several["choices"]] == [score.logprob for score in scores]
    assert several["best"] == max(range(3), key=lambda index: scores[index].logprob)
    (answer,) = engine.score([LINES[3]["messages"]], ["Yes."])
    assert (chat["logprob"], chat["is_greedy"]) == (answer.logprob, answer.is_greedy)
    assert {record["finish_reason"] for record in (whole, one, several, chat)} == {"stop"}


def test_a_file_is_resumed_and_keeps_what_was_scored(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    bad = [
        {"prompt": "a", "choices": []},
        {"prompt": "a", "choice": ["b"]},
        {"messages": [{"role": "user"}]},
    ]
    write_lines(tmp_path / "in.jsonl", *LINES[1:3], *bad)
    assert main([*command, "-o", str(output), "--logprobs", "0"]) == 1
    first = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["finish_reason"] for record in first] == ["stop"] * 2 + ["error"] * 3
    assert [record["id"] for record in first] == ["one", 2, 3, 4, 5]
    assert '"choices" must be a list' in first[2]["error"]
    assert "no field 'choice'" in first[3]["error"]
    assert all("token_logprobs" in choice for choice in first[1]["choices"])
    capsys.readouterr()
    write_lines(tmp_path / "in.jsonl", *LINES[1:3], LINES[0])
    assert main([*command, "-o", str(output), "--logprobs", "0"]) == 0
    assert "1 scored, 2 already done." in capsys.readouterr().err
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()][-1] == "whole"
    assert main([*command, "-o", str(output)]) == 2
    assert "made with different settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--system", "x"], "--system has no meaning with --score"),
        (["--answers", "2"], "--answers has no meaning with --score"),
    ],
)
def test_options_of_answers_are_refused(
    command: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *more]) == 2
    assert message in capsys.readouterr().err
    assert main(["generate", "-p", "Hi", "--logprobs", "1"]) == 2
    assert "--logprobs needs --json, --input or --output." in capsys.readouterr().err
    assert main(["generate", "--score", "-p", "Hi"]) == 2
    assert "--score needs --input" in capsys.readouterr().err


def test_answers_have_the_same_figures(
    engine: Engine, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", {"prompt": "Tea is", "logprobs": 1})
    answering = [word for word in command if word != "--score"]
    assert main([*answering, "--raw", "--max-tokens", "4", "--logprobs", "0"]) == 0
    (answer,) = records(capsys.readouterr().out)
    (score,) = engine.score(["Tea is"], [answer["text"]], top=1)
    assert answer["token_logprobs"] == score.to_json(per_token=True)["token_logprobs"]
    assert [found["id"] for found in answer["token_logprobs"]] == answer["tokens"]
