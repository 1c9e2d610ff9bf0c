"""The engines that are abused, the questions they are asked, and what an untouched engine answers."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgespec
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig, Grammar
from tests.least_memory import load_in_least_memory

CONTEXT = 512
GREEDY = GenerationConfig(max_tokens=24)
QUESTIONS: tuple[tuple[str, GenerationConfig], ...] = (
    ("Write a short story about a fox and a crow who share a house.", GREEDY),
    ("Why is the sky blue?", GREEDY.with_(temperature=0.8, seed=3)),
    ("Count from one to thirty.", GREEDY.with_(temperature=1.0, top_k=20, seed=9)),
    ("Repeat: red, blue, red, blue, red, blue.", GREEDY.with_(repeat_penalty=1.2)),
    (
        "Describe a person as JSON.",
        GREEDY.with_(grammar=Grammar("regex", r'\{"name": "[A-Za-z ]{1,20}", "age": [0-9]{1,3}\}')),
    ),
    ("word " * 150 + "What comes next?", GREEDY),
)
# Every engine decodes exactly, so that all of them must say the same.
KINDS: dict[str, dict[str, Any]] = {
    "in memory, drafted by a model": {"draft": "model", "tree_budget": 16},
    "in memory, drafted from its text": {"draft": "lookup", "tree_budget": 12},
    "streamed, without drafts": {"draft": "none", "offload": "stream"},
    "streamed, drafted by a model": {"draft": "model", "offload": "stream", "tree_budget": 16},
    "streamed, sized while it runs": {"draft": "lookup", "offload": "stream"},
}


@dataclass
class Subject:
    """One engine, opened anew when it was closed.

    Attributes:
        kind: its key in KINDS.
        expected: tokens that an untouched engine answers, by question.
    """

    kind: str
    open: Callable[[], Engine]
    expected: list[list[int]]
    folder: Path
    chance: random.Random
    engine: Engine

    def reopen(self) -> None:
        """Another engine of the same kind in the place of one that is closed."""
        self.engine = self.open()

    def wrong_answer(self) -> str:
        """Ask one of the questions; what is wrong with the answer, or nothing."""
        number = self.chance.randrange(len(QUESTIONS))
        prompt, config = QUESTIONS[number]
        answer = self.engine.generate(prompt, config)
        if answer.tokens == self.expected[number]:
            return ""
        return f"question {number} was answered {answer.tokens} instead of {self.expected[number]}"


def untouched_answers(model: Path) -> list[list[int]]:
    """Answers of plain decoding, each by an engine of its own."""
    answers = []
    for prompt, config in QUESTIONS:
        with edgespec.load(model, draft="none", exact=True, context=CONTEXT, threads=1) as engine:
            answers.append(engine.generate(prompt, config).tokens)
    return answers


def open_engine(model: Path, drafter: Path, kind: str) -> Engine:
    """An engine of a kind; a streamed one in as little memory as it can do with."""
    # Threads that share cores with other programs wait for each other.
    options = {"exact": True, "context": CONTEXT, "threads": 1, **KINDS[kind]}
    if options["draft"] == "model":
        options["draft"] = drafter
    if options.get("offload") != "stream":
        return edgespec.load(model, **options)
    return load_in_least_memory(model, **options)


def subjects(model: Path, drafter: Path, chance: random.Random) -> list[Subject]:
    """One engine of each kind, with what it must answer."""
    expected = untouched_answers(model)
    folder = Path(tempfile.mkdtemp(prefix="edgespec-abuse-"))
    found = []
    for kind in KINDS:

        def opened(kind: str = kind) -> Engine:
            return open_engine(model, drafter, kind)

        found.append(Subject(kind, opened, expected, folder, chance, opened()))
    return found
