"""The promise of --exact: the same text, token for token, whatever the drafter and the tree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from tests.tiers import slow_except

STORY = "Write a short story about a fox and a crow who share a house."
_LETTER = (
    "Dear Anna, we found the old house at the end of the lane. It has a kitchen with a stone floor, a room "
    "for guests, and a garden with apple trees. The roof leaks, the windows rattle, and the stairs creak, "
    "but the view over the valley is lovely. Every morning the fog lies on the river, and every evening "
    "the swallows fly around the chimney. Please come and see it before the first snow falls. "
)
_WISH = "Write in a friendly tone, and mention the apple trees."
# So long that the answer passes position 256, in a context so short that the cache is compacted on the way.
PROMPTS = [
    f"Answer this letter: {_LETTER * 2}{_WISH}",
    f"Repeat this letter: {_LETTER * 2}{_WISH}",
    f"Correct the mistakes in this letter: {_LETTER * 2}{_WISH}",
]
CONTEXT, TOKENS = 320, 32


@pytest.fixture(scope="module")
def plain(smol_path: Path) -> Iterator[Engine]:
    with edgespec.load(smol_path, draft="none", exact=True, context=CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafts(q4_drafter_path: Path, dropped_drafter_path: Path) -> dict[str, Path | str]:
    return {"q4_0": q4_drafter_path, "dropped": dropped_drafter_path, "lookup": "lookup"}


Plainly = Callable[[GenerationConfig, str], tuple[Generation, bytes]]


@pytest.fixture(scope="module")
def plainly(plain: Engine) -> Plainly:
    """The answer without drafts, and the state it leaves; computed once."""
    return cache(lambda config, prompt: (generate(plain, config, prompt), state_of(plain)))


def state_of(engine: Engine) -> bytes:
    """A digest of all keys and values: rounding shows there long before it changes a token."""
    cache = engine.target.cache
    return hashlib.blake2b(bytes(cache.save(0, cache.length))).digest()


def generate(engine: Engine, config: GenerationConfig, prompt: str = STORY) -> Generation:
    engine.target.rewind(0)
    return engine.generate(prompt, config)


@pytest.mark.parametrize(
    ("draft", "budget", "temperature"),
    slow_except([("q4_0", 60, 0.0)], [("q4_0", 60, 0.0), ("lookup", 32, 0.0), ("dropped", 32, 0.8)]),
)
def test_text_does_not_depend_on_the_tree(
    smol_path: Path,
    drafts: dict[str, Path | str],
    plainly: Plainly,
    draft: str,
    budget: int,
    temperature: float,
) -> None:
    config = GenerationConfig(max_tokens=TOKENS, temperature=temperature, seed=11)
    with edgespec.load(
        smol_path, draft=drafts[draft], tree_budget=budget, exact=True, context=CONTEXT
    ) as engine:
        # How soon the cache must be compacted depends on how many drafts are rejected, and so on the text.
        for prompt in PROMPTS:
            expected, state = plainly(config, prompt)
            answer = generate(engine, config, prompt)
            assert answer.tokens == expected.tokens
            assert answer.text == expected.text
            assert state_of(engine) == state
            assert answer.exact
            assert expected.tokens_per_pass == 1
            assert max(record.nodes for record in answer.passes) > 1
            passed = expected.prompt_tokens < 256 < expected.prompt_tokens + len(expected.tokens)
            if engine.target.cache.compactions and passed:
                break
        else:
            pytest.fail("the cache was never compacted, or every answer was too short")


@pytest.mark.slow
def test_several_turns_do_not_depend_on_the_tree(
    smol_path: Path, drafts: dict[str, Path | str], plain: Engine
) -> None:
    config = GenerationConfig(max_tokens=32)
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
    config = GenerationConfig(max_tokens=32)
    fresh = generate(plain, config)
    encoded = plain.encoder.encode(STORY)
    for shared in (1, 5, 17, len(encoded) - 1):
        plain.target.rewind(0)
        plain.generate([*encoded[:shared], 100, 200, 300], GenerationConfig(max_tokens=9))
        assert plain.generate(STORY, config).tokens == fresh.tokens


@pytest.mark.slow
def test_a_second_architecture_with_sliding_windows_is_exact_too(gemma_path: Path) -> None:
    config = GenerationConfig(max_tokens=60)
    repeating = "The quick brown fox jumps over the lazy dog. " * 6 + "The quick"
    # Mixed quantizations round differently by row count for some inputs only: one prompt is too few.
    prompts = [repeating, "Explain recursion to a ten year old."]
    answers = []
    for draft, budget in (("none", None), ("lookup", 24)):
        with edgespec.load(gemma_path, draft=draft, tree_budget=budget, exact=True, context=512) as engine:
            answers.append([engine.generate(prompt, config, raw=True) for prompt in prompts])
    for plain, drafted in zip(*answers, strict=True):
        assert drafted.tokens == plain.tokens
        assert drafted.tokens_per_pass > 1


def test_an_engine_says_when_it_is_not_exact(smol_path: Path) -> None:
    with edgespec.load(smol_path, draft="none", exact=False) as engine:
        assert not generate(engine, GenerationConfig(max_tokens=2)).exact
