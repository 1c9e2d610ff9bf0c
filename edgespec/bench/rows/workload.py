"""The prompts of a measurement: questions of several kinds, in the format of Spec-Bench.

Each line is a JSON object with `question_id`, `category` and `turns`; only the first turn of a conversation
is asked.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import UsageError

_OWN = Path(__file__).with_name("workload.jsonl")


@dataclass(frozen=True)
class Question:
    """One question."""

    identifier: str  # what the file calls it
    category: str  # the kind of question, for balance
    text: str  # what is asked


def own_questions() -> tuple[Question, ...]:
    """A few questions of our own: chat, code, summaries, translation and reasoning."""
    return read_questions(_OWN)


def read_questions(path: Path) -> tuple[Question, ...]:
    """The questions of a file."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON texts may contain other line separators
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", "Name a file with --workload."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file.", "--workload takes a file of JSON lines.") from error
    questions = tuple(
        _question(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not questions:
        raise UsageError(f"{path} contains no questions.", "--workload takes a file of JSON lines.")
    return questions


def balanced(questions: Sequence[Question], count: int) -> tuple[Question, ...]:
    """The first `count` of them, taking one of each category in turn."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    rounds = itertools.zip_longest(*by_category.values())
    taken = [question for round_ in rounds for question in round_ if question is not None]
    return tuple(taken[:count])


def _question(line: str, number: int, path: Path) -> Question:
    def wrong(what: str) -> UsageError:
        return UsageError(
            f"Line {number} of {path} {what}.",
            'A line is like {"question_id": 1, "category": "chat", "turns": ["Why is the sky blue?"]}.',
        )

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise wrong("is not JSON") from error
    if not isinstance(row, dict):
        raise wrong("is not a JSON object")
    for name in ("question_id", "category", "turns"):
        if name not in row:
            raise wrong(f"has no '{name}'")
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise wrong("has no string as its first turn")
    return Question(str(row["question_id"]), str(row["category"]), turns[0])
