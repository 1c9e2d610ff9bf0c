"""Checks of answers that the library and the program give."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import edgespec
from edgespec.generation.config import GenerationConfig, Grammar
from tests.real.pair import Pair, require

_QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences what a hash table is.",
    "Name the days of the week, one a line.",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}


def chat(pair: Pair) -> str:
    """Three turns, the last of which needs the first."""
    with pair.load() as engine:
        session = edgespec.Session(engine)
        for text in ("My name is Ada. Please remember it.", "What is 2 + 2?", "What is my name?"):
            answer = "".join(chunk.text for chunk in session.ask(text, GenerationConfig(max_tokens=32)))
    require("Ada" in answer, f"the name was forgotten: {answer!r}")
    return f"answered {answer!r}"


def json_schema(pair: Pair) -> str:
    """Answers that must have the form of a schema, greedily and sampled."""
    form = Grammar.of_schema(_SCHEMA)
    with pair.load() as engine:
        for temperature in (0.0, 0.8):
            config = GenerationConfig(max_tokens=100, grammar=form, temperature=temperature, seed=5)
            text = engine.generate("Describe a well-known film as JSON.", config).text
            _require_form(text)
    return f"the last one: {text}"


def _require_form(text: str) -> None:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    fits = (
        isinstance(found, dict)
        and set(found) == {"title", "year", "tags"}
        and isinstance(found["title"], str)
        and isinstance(found["year"], int)
        and 1900 <= found["year"] <= 2100
        and len(found["tags"]) <= 3
    )
    require(fits, f"not of the schema: {text!r}")


def exactness(pair: Pair, expected: list[list[int]]) -> str:
    """The pair, with any trees and within any budget, says what its target says alone and unconstrained."""
    found = tokens_of(pair)
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    require(same == len(expected), f"{same} of {len(expected)} answers are equal")
    return f"{same} of {same} answers equal those of the target alone, {sum(map(len, found))} tokens"


def tokens_of(pair: Pair, **options: Any) -> list[list[int]]:
    """Answers to some questions, greedily and sampled."""
    with pair.load(**options) as engine:
        return [
            engine.generate(
                question, GenerationConfig(max_tokens=24, temperature=temperature, seed=11)
            ).tokens
            for question in _QUESTIONS
            for temperature in (0.0, 0.8)
        ]


def batch(pair: Pair) -> str:
    """A file of requests, several at a time: every line is answered once, with the text it has alone."""
    questions = [f"What is {n} + {n}? Answer with the number alone." for n in range(2, 14)]
    with tempfile.TemporaryDirectory() as folder:
        prompts, answers = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        lines = [json.dumps({"id": str(n), "prompt": text}) for n, text in enumerate(questions)]
        prompts.write_text("\n".join(lines) + "\n")
        files = ["--input", str(prompts), "--output", str(answers), "--max-tokens", "8", "--parallel", "4"]
        command = [sys.executable, "-m", "edgespec", "generate", *pair.arguments, *files, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        require(done.returncode == 0, done.stderr)
        results = [json.loads(line) for line in answers.read_text().splitlines()]
    require([result["id"] for result in results] == [str(n) for n in range(len(questions))], "lines differ")
    require(all(result["error"] is None for result in results), results)
    with pair.load() as engine:
        for n in (0, 5, 11):
            alone = engine.generate(questions[n], GenerationConfig(max_tokens=8)).text
            require(results[n]["text"] == alone, f"{results[n]['text']!r} instead of {alone!r}")
    return f"{len(results)} lines answered, three of them compared with answers alone"
