"""Counts: tokens of the answer, and nothing behind its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.bench.rows.child import answers
from edgespec.costs.curves import Curve
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import SequenceTree, TextSequence
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.profiles.store import PassProfile, ProfileStore
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import TokenTree

SHORT = "Reply with one word: what is the capital of France?"


def counted(answer: Generation) -> int:
    """Tokens that passes yielded."""
    return sum(record.accepted + 1 for record in answer.passes)


@pytest.fixture(scope="module")
def engine(smol_path: Path) -> Iterator[Engine]:
    """Its own drafter: whatever the target would say behind the end of an answer is drafted."""
    with edgespec.load(smol_path, draft=smol_path, tree_budget=24, context=512) as engine:
        yield engine


class Knowing(Drafter):
    """Drafts a known text, and continues behind its end."""

    name = "knowing"

    def __init__(self, text: Sequence[int]) -> None:
        self._text = list(text)

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        rest = self._text[len(text) : len(text) + limits.depth]
        return TokenTree.chain([text[-1], *rest][: limits.budget])


def ended(engine: Engine, **settings: object) -> tuple[list[int], Generation]:
    prompt = engine.encoder.encode(SHORT)
    answer = engine.generate(prompt, GenerationConfig(max_tokens=200, **settings))  # type: ignore[arg-type]
    assert answer.finish_reason == "stop"
    return prompt, answer


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "seed": 4, "verify": "specinfer"}])
def test_the_end_token_is_counted_and_nothing_behind_it(engine: Engine, settings: dict[str, object]) -> None:
    _, answer = ended(engine, **settings)
    assert counted(answer) == len(answer.tokens) + 1
    assert answer.tokens_per_pass == pytest.approx((len(answer.tokens) + 1) / len(answer.passes))
    is_end = engine.target.model.vocabulary.is_end
    assert engine.speculator.last_round is not None
    tree = engine.speculator.last_round[0]
    parents = {int(parent) for parent in tree.parents.tolist() if parent > 0}
    assert not any(is_end(int(tree.tokens[parent])) for parent in parents), "drafted behind an end"


def test_a_drafter_that_continues_behind_the_end_gains_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, answer = ended(engine)
    text = [*prompt, *answer.tokens]
    # The end token, and what the target itself would say behind it, so that all of it would be accepted.
    for _ in range(8):
        sequence = TextSequence(list(text))
        engine.target.prefill(sequence)
        trees = [SequenceTree(sequence, TokenTree.root_only(text[-1]))]
        text.append(int(np.argmax(engine.target.verify(trees).logits[0][0])))
        engine.target.commit(trees, [[0]])
    assert engine.target.model.vocabulary.is_end(text[len(prompt) + len(answer.tokens)])
    monkeypatch.setattr(engine, "drafter", Knowing(text))
    engine.target.rewind(0)
    _, again = ended(engine)
    assert again.tokens == answer.tokens
    assert counted(again) == len(again.tokens) + 1
    assert again.acceptance_rate < 1, "what was drafted behind the end was accepted for nothing"


def test_an_answer_without_drafts_has_no_tree(engine: Engine) -> None:
    engine.generate(SHORT, GenerationConfig(max_tokens=8))
    assert engine.speculator.last_round is not None
    assert not engine.generate(SHORT, GenerationConfig(max_tokens=1)).drafted
    assert engine.speculator.last_round is None


def test_a_stop_string_cuts_the_figures_too(engine: Engine) -> None:
    whole = engine.generate("Why is the sky blue?", GenerationConfig(max_tokens=40)).text
    answer = engine.generate("Why is the sky blue?", GenerationConfig(max_tokens=40, stop=(whole[30:36],)))
    assert answer.finish_reason == "stop"
    assert counted(answer) == len(answer.tokens)


def test_chunks_hold_the_tokens_of_the_answer(engine: Engine) -> None:
    chunks = list(engine.stream(SHORT, GenerationConfig(max_tokens=200)))
    answer = chunks[-1].generation
    assert answer is not None
    assert answer.finish_reason == "stop"
    assert [token for chunk in chunks for token in chunk.tokens] == answer.tokens


def test_a_bench_counts_as_an_answer_does(smol_path: Path) -> None:
    result = answers(
        {
            "load": {"model": str(smol_path), "draft": str(smol_path), "tree_budget": 24, "context": 512},
            "config": {"max_tokens": 200},
            "prompts": [SHORT],
            "repetitions": 1,
            "row_seconds": 600,
            "curve": False,
        }
    )
    (tokens,) = result["answers"]
    passes = sum(result["rows"].values())
    assert result["tokens_per_pass"] * passes == pytest.approx(len(tokens) + 1)


@pytest.mark.usefixtures("own_profiles")
def test_a_speed_up_compares_with_passes_of_the_same_minutes(short_path: Path) -> None:
    """What was measured at another time, when passes took a thousandth as long, says nothing."""
    with edgespec.load(short_path, draft="none", context=128) as engine:
        assert engine.keys is not None
        stale = PassProfile(Curve.through([(1, 1e-6), (64, 1e-6)]))
    keys = replace(engine.keys, drafter="lookup")
    ProfileStore().put(keys.passes, stale)
    with edgespec.load(short_path, draft="lookup", context=128) as engine:
        assert engine.keys is not None
        assert engine.keys.passes == keys.passes
        answer = engine.generate(
            "one two three one two three one two", GenerationConfig(max_tokens=24), raw=True
        )
    seconds = [record.target_s + record.hidden_draft_s for record in answer.passes]
    assert min(seconds) <= answer.plain_pass_s <= max(seconds)
    assert (answer.gain > 0) == (answer.drafted > 0)
