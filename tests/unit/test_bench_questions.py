"""The questions that `edgespec bench` asks: its own, and those of files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from edgespec.bench.rows.preparation import balanced, context_for, own_questions, read_questions
from edgespec.errors import UsageError


def test_our_own_questions_are_of_five_kinds() -> None:
    questions = own_questions()
    assert Counter(question.category for question in questions) == dict.fromkeys(
        ("chat", "code", "summary", "translation", "reasoning"), 3
    )
    assert len({question.text for question in questions}) == len(questions)


def test_spec_bench_is_read_and_the_first_turn_asked(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
        {"question_id": "x", "category": "math", "turns": ["1 + 1?"], "reference": ["2"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [(q.identifier, q.category, q.text) for q in read_questions(file)] == [
        ("81", "writing", "One?"),
        ("x", "math", "1 + 1?"),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"question_id": 1, "turns": ["a"]}', "has no 'category'"),
        ('{"question_id": 1, "category": "a", "turns": []}', "has no string as its first turn"),
        ('{"question_id": 1, "category": "a", "turns": "a"}', "has no string as its first turn"),
        ('{"question_id": 1, "category": "a", "turns": [" "]}', "has no string as its first turn"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 1, "category": "a", "turns": ["a"]}\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        read_questions(file)
    assert caught.value.what == f"Line 2 of {file} {what}."
    assert "question_id" in caught.value.hint


def test_a_file_without_questions(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, what in (
        (empty, "contains no questions"),
        (binary, "is not a text file"),
        (tmp_path / "none", "cannot be read: No such file"),
    ):
        with pytest.raises(UsageError, match=what):
            read_questions(path)


def test_few_questions_are_of_all_kinds() -> None:
    questions = own_questions()
    assert [q.category for q in balanced(questions, 6)] == [
        *("chat", "code", "summary", "translation", "reasoning"),
        "chat",
    ]
    assert set(balanced(questions, 1000)) == set(questions)
    assert len({q.identifier for q in balanced(questions, 7)}) == 7


def test_the_context_holds_the_longest_question() -> None:
    assert context_for(["short"], 64) == 256
    assert context_for(["short", "x" * 500], 64) == 768
    assert context_for(["x" * 100_000], 64) == 4096
