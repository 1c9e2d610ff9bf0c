"""The promise of --exact: the same text, token for token, whatever the drafter and the tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation

PROMPTS = [
    "Write a short story about a fox and a crow who share a house.",
    "Write a story of five hundred words about a lighthouse.",
    "Explain at length how bread is made, step by step, for somebody who has never baked.",
    "List the numbers from one to two hundred in words.",
    "Describe every room of a large old house in detail.",
]
# Past 256 cached positions, in a context so short that the cache must be compacted on the way.
CONTEXT, TOKENS = 384, 300


@pytest.fixture(scope="module")
def plain(smol_path: Path) -> Iterator[Engine]:
    with edgespec.load(smol_path, draft="none", exact=True, context=CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafts(q4_drafter_path: Path, dropped_drafter_path: Path) -> dict[str, Path | str]:
    return {"q4_0": q4_drafter_path, "dropped": dropped_drafter_path, "lookup": "lookup"}


def generate(engine: Engine, config: GenerationConfig, prompt: str = PROMPTS[0]) -> Generation:
    engine.target.rewind(0)
    return engine.generate(prompt, config)


@pytest.mark.parametrize(
    ("draft", "budget", "temperature"),
    [("q4_0", 60, 0.0), ("dropped", 16, 0.0), ("lookup", 32, 0.0), ("q4_0", 32, 1.0), ("dropped", 32, 0.8)],
)
def test_text_does_not_depend_on_the_tree(
    smol_path: Path, drafts: dict[str, Path | str], plain: Engine, draft: str, budget: int, temperature: float
) -> None:
    config = GenerationConfig(max_tokens=TOKENS, temperature=temperature, seed=11)
    with edgespec.load(
        smol_path, draft=drafts[draft], tree_budget=budget, exact=True, context=CONTEXT
    ) as engine:
        # How soon the cache must be compacted depends on how many drafts are rejected, and so on the text.
        for prompt in PROMPTS:
            expected = generate(plain, config, prompt)
            answer = generate(engine, config, prompt)
            assert answer.tokens == expected.tokens
            assert answer.text == expected.text
            assert answer.exact
            assert expected.tokens_per_pass == 1
            assert max(record.nodes for record in answer.passes) > 1
            if engine.target.cache.compactions:
                break
        else:
            pytest.fail("the cache was never compacted")


def test_several_turns_do_not_depend_on_the_tree(
    smol_path: Path, drafts: dict[str, Path | str], plain: Engine
) -> None:
    config = GenerationConfig(max_tokens=60)
    turns = ["My name is Ada and I like rowing.", "What is my name?", "Write a sentence about my hobby."]

    def talk(engine: Engine) -> list[dict[str, str]]:
        engine.target.rewind(0)
        session = edgespec.Session(engine)
        for turn in turns:
            list(session.ask(turn, config))
        return session.messages

    with edgespec.load(
        smol_path, draft=drafts["q4_0"], tree_budget=16, exact=True, context=CONTEXT
    ) as engine:
        assert talk(engine) == talk(plain)


def test_text_does_not_depend_on_what_the_cache_held_before(plain: Engine) -> None:
    config = GenerationConfig(max_tokens=40)
    fresh = generate(plain, config)
    encoded = plain.encoder.encode(PROMPTS[0])
    for shared in (1, 5, 17, len(encoded) - 1):
        plain.target.rewind(0)
        plain.generate([*encoded[:shared], 100, 200, 300], GenerationConfig(max_tokens=9))
        assert plain.generate(PROMPTS[0], config).tokens == fresh.tokens


def test_a_second_architecture_with_sliding_windows_is_exact_too(gemma_path: Path) -> None:
    config = GenerationConfig(max_tokens=100)
    repeating = "The quick brown fox jumps over the lazy dog. " * 6 + "The quick"
    # Mixed quantizations round differently by row count for some inputs only: one prompt is too few.
    prompts = [repeating, "Explain recursion to a ten year old.", "Write a Python function."]
    answers = []
    for draft in ("none", "lookup"):
        with edgespec.load(gemma_path, draft=draft, tree_budget=24, exact=True, context=512) as engine:
            answers.append([engine.generate(prompt, config, raw=True) for prompt in prompts])
    for plain, drafted in zip(*answers, strict=True):
        assert drafted.tokens == plain.tokens
        assert drafted.tokens_per_pass > 1


def test_an_engine_says_when_it_is_not_exact(smol_path: Path) -> None:
    with edgespec.load(smol_path, draft="none", exact=False) as engine:
        assert not generate(engine, GenerationConfig(max_tokens=2)).exact
