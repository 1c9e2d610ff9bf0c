"""Drafters with another vocabulary: they draft trees of the target's tokens, and never change its text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.translation import Translation
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.speculation.draws import Draws
from edgespec.speculation.growth import usual_limits
from edgespec.speculation.sampled_trees import Drawing, by_rank
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.verification.base import Law

TEXT = (
    "def naïve(café: list[int]) -> None:\n    '''日本語 😀 counts.'''\n    return sum(café)\n\n\n"
    "The keeper wrote 1,234 names down, and nobody read them aloud.\n"
)
PROMPTS = ["Why is the sky blue?", "Translate 'naïve café, 日本語 😀' into French."]
CONFIGS = [
    GenerationConfig(max_tokens=24),
    GenerationConfig(max_tokens=24, temperature=0.8, top_p=0.95, seed=5),
]


@pytest.fixture(scope="module")
def vocabularies(smol_path: Path, gemma_path: Path) -> Iterator[tuple[Vocabulary, Vocabulary]]:
    with Model(smol_path, vocabulary_only=True) as one, Model(gemma_path, vocabulary_only=True) as other:
        yield one.vocabulary, other.vocabulary


@pytest.fixture(scope="module", params=[False, True], ids=["gemma-drafts", "smol-drafts"])
def pair(
    vocabularies: tuple[Vocabulary, Vocabulary], request: pytest.FixtureRequest
) -> tuple[Vocabulary, Vocabulary, Translation]:
    target, own = reversed(vocabularies) if request.param else vocabularies
    return target, own, Translation(target, own)


def test_texts_are_read_byte_for_byte(pair: tuple[Vocabulary, Vocabulary, Translation]) -> None:
    target, own, translation = pair
    tokens = target.tokenize(TEXT, control=False)
    read = translation.read(tokens)
    begin = [own.bos] if own.adds_bos else []
    assert read[: len(begin)] == begin
    assert b"".join(map(own.piece, read[len(begin) :])) == TEXT.encode()
    for end in range(1, len(tokens)):
        part = translation.read(tokens[:end])
        assert part == read[: len(part)]
    single = translation.single(np.arange(translation.n_target, dtype=np.int32))
    assert translation.n_shared == np.count_nonzero(single >= 0) > 40_000
    assert len(set(single[single >= 0].tolist())) == translation.n_shared


def test_logits_are_those_of_the_tokens_that_both_have(
    pair: tuple[Vocabulary, Vocabulary, Translation],
) -> None:
    target, own, translation = pair
    rng = np.random.default_rng(3)
    for rows in (2, 1, 3):
        logits = rng.standard_normal((rows, own.n_tokens)).astype(np.float32)
        found = translation.logits(logits)
        assert found.shape == (rows, target.n_tokens)
        single = translation.single(np.arange(target.n_tokens, dtype=np.int32))
        assert (found[:, single >= 0] == logits[:, single[single >= 0]]).all()
        assert (found[:, single < 0] == -np.inf).all()
        found[:] = 7  # what a caller does to them does not come back


def test_joined_paths_have_the_same_texts(pair: tuple[Vocabulary, Vocabulary, Translation]) -> None:
    target, _, translation = pair
    rng, letters = np.random.default_rng(4), [target.tokenize(c, control=False)[-1] for c in "thern()\n. :_1"]
    joined_any = False
    for _ in range(60):
        n = int(rng.integers(2, 40))
        parents = [-1, *(int(rng.integers(max(0, node - 4), node)) for node in range(1, n))]
        scores = [0.0]
        for node in range(1, n):
            scores.append(scores[parents[node]] - float(rng.exponential(0.6)))
        tree = TokenTree.build([letters[0], *rng.choice(letters, n - 1).tolist()], parents, scores).merged()
        found = translation.joined(tree)
        joined_any |= not np.isin(found.tokens, letters).all()
        before, after = texts(target, tree), texts(target, found)
        assert after <= before
        assert texts(target, tree, best=True) <= after  # what was likeliest is still there
        assert (found.logprobs[1:] <= found.logprobs[found.parents[1:]] + 1e-5).all()
        assert len(found) <= len(tree)
    assert joined_any


def texts(vocabulary: Vocabulary, tree: TokenTree, *, best: bool = False) -> set[bytes]:
    """The texts of the paths from below the root to each node, or to the best leaf."""
    nodes = list(range(1, len(tree)))
    if best:
        nodes = sorted(tree.leaves.tolist(), key=lambda leaf: -float(tree.logprobs[leaf]))[:1]
    return {
        b"".join(vocabulary.piece(int(tree.tokens[step])) for step in tree.path(node)[1:]) for node in nodes
    }


def test_learning_takes_joined_tokens_apart(pair: tuple[Vocabulary, Vocabulary, Translation]) -> None:
    target, _, translation = pair
    tokens = target.tokenize(TEXT, control=False)
    taken = translation.split(tokens)
    assert b"".join(map(target.piece, taken)) == TEXT.encode()
    assert len(taken) > len(tokens)


def test_the_law_of_drawn_tokens_is_that_of_the_tokens_that_both_have(
    smol_path: Path, gemma_path: Path
) -> None:
    with edgespec.load(
        smol_path, draft=gemma_path, tree_budget=8, exact=False, context=256, drafter="model", threads=1
    ) as engine:
        drafter, n_vocab = drafter_of(engine), engine.vocabulary_size
        sequence = engine.encoder.encode(PROMPTS[0])

        def law(logits: FloatArray, below: object) -> Law:
            del below
            weights = np.exp(logits.astype(np.float64) - logits.max())
            found: Law = weights / weights.sum()
            return found

        shape = by_rank(usual_limits(4))
        drawing = Drawing(shape, False, law, RandomDraws())
        drafted = drafter.draw(sequence, drawing, 4)
        translation = drafter._translation
        assert translation is not None
        assert len(drafted.tree) > 2
        with Model(gemma_path) as model:
            context = Context(model, n_cells=256, n_rows=64, n_outputs=8, n_sequences=1, n_threads=1)
            for node, known in drafted.laws.items():
                path = [int(drafted.tree.tokens[step]) for step in drafted.tree.path(node)[1:]]
                read = translation.read([*sequence, *path])
                context.clear()
                context.decode(TokenBatch.run(read, 0, 1, "last"))
                expected = law(translation.logits(context.logits())[0], ())
                assert np.count_nonzero(known) <= translation.n_shared < n_vocab
                assert np.abs(known - expected).sum() < 0.2  # rows of a batch are rounded differently
                assert set(drafted.drawn[node]) <= set(np.flatnonzero(known).tolist())
            context.close()
        drawn = GenerationConfig(max_tokens=8, temperature=0.8, seed=5, verify="recursive")
        answer = engine.generate(PROMPTS[0], drawn)
        assert answer.passes[0].nodes > 1
        assert answer.tokens_per_pass >= 1


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "merged"])
def test_the_text_is_the_targets_own(smol_path: Path, gemma_path: Path, drafter: str) -> None:
    with edgespec.load(smol_path, draft="none", exact=True, context=256) as engine:
        plain = [[engine.generate(prompt, config).tokens for prompt in PROMPTS] for config in CONFIGS]
    with edgespec.load(
        smol_path, draft=gemma_path, drafter=drafter, tree_budget=8, exact=True, context=256
    ) as engine:
        assert any("differ" in note and "tokens that both have" in note for note in engine.notes)
        for config, expected in zip(CONFIGS, plain, strict=True):
            answers = [engine.generate(prompt, config) for prompt in PROMPTS]
            assert [answer.tokens for answer in answers] == expected
            assert answers[0].tokens_per_pass > 1.15
            together = engine.generate_many(PROMPTS, config, parallel=2)
            assert [answer.tokens for answer in together] == expected


@pytest.mark.slow
def test_a_text_with_more_tokens_than_cells(smol_path: Path, short_path: Path, gemma_path: Path) -> None:
    """The drafter has more tokens of a text than the target, and less room than it would need for all."""
    text = "안녕하세요 " * 70
    with edgespec.load(gemma_path, draft="none", exact=True, context=256) as engine:
        plain = engine.generate(text, GenerationConfig(max_tokens=12), raw=True)
    with edgespec.load(gemma_path, draft=short_path, tree_budget=8, exact=True, context=256) as engine:
        drafter = drafter_of(engine)
        assert drafter._window.most < len(drafter._own(engine.encoder.encode(text, raw=True)))
        drafted = engine.generate(text, GenerationConfig(max_tokens=12), raw=True)
    assert drafted.tokens == plain.tokens


class RandomDraws(Draws):
    """Draws from a generator."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(6)

    def coin(self, chance: float) -> bool:
        return bool(self._rng.random() < chance)

    def pick(self, weights: NDArray[np.float64]) -> int:
        return int(self._rng.choice(len(weights), p=weights / weights.sum()))


def drafter_of(engine: Engine) -> ModelDrafter:
    assert isinstance(engine.drafter, ModelDrafter)
    return engine.drafter
