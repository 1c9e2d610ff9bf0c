"""Verification loses nothing: whatever the tree, the accepted text is the target's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.adjustments import Adjustments
from edgespec.speculation.sampling import Sampler, sample_and_match
from edgespec.speculation.spelling import Spelling
from edgespec.speculation.tree import Acceptance, TokenTree
from tests.letters import Letters
from tests.unit.strategies import distinct_trees, text_of

Text = tuple[int, ...]
Law = dict[Text, float]
_KINDS = ("smooth", "zeros", "one hot", "even")
_LENGTH = 4


def _target(seed: int, vocabulary: int, kind: str) -> Callable[[Text], np.ndarray]:
    """A distribution over the next token for every text."""

    @cache
    def chances(text: Text) -> np.ndarray:
        rng = np.random.default_rng([seed, *text])
        if kind == "even":
            return np.full(vocabulary, 1 / vocabulary)
        if kind == "one hot":
            return np.eye(vocabulary)[rng.integers(vocabulary)]
        weights = rng.exponential(size=vocabulary) ** 2
        if kind == "zeros":
            weights *= rng.random(vocabulary) < 0.5
            weights[rng.integers(vocabulary)] += 0.1
        result: np.ndarray = weights / weights.sum()
        return result

    return chances


class _NeedsDrawError(Exception):
    def __init__(self, node: int) -> None:
        self.node = node


def _outcomes(tree: TokenTree, chances: Callable[[Text], np.ndarray]) -> Iterator[tuple[Acceptance, float]]:
    """Every outcome of the pass with its probability: each draw is made in all possible ways."""
    open_scripts: list[tuple[Text, float]] = [((), 1.0)]
    while open_scripts:
        script, weight = open_scripts.pop()
        draws = iter(script)

        def choose(node: int, draws: Iterator[int] = draws) -> int:
            for token in draws:
                return token
            raise _NeedsDrawError(node)

        try:
            yield sample_and_match(tree, choose), weight
        except _NeedsDrawError as asked:
            for token, chance in enumerate(chances(text_of(tree, asked.node))):
                if chance > 0:
                    open_scripts.append(((*script, token), weight * chance))


def _continued(start: Law, chances: Callable[[Text], np.ndarray], length: int) -> Law:
    """The law of the first `length` tokens after texts of some law."""
    law: Law = defaultdict(float)
    todo = list(start.items())
    while todo:
        text, weight = todo.pop()
        if len(text) >= length:
            law[text[:length]] += weight
        else:
            todo += [((*text, t), weight * p) for t, p in enumerate(chances(text)) if p > 0]
    return law


@st.composite
def _cases(draw: st.DrawFn) -> tuple[TokenTree, Callable[[Text], np.ndarray]]:
    vocabulary = draw(st.integers(2, 4))
    tree = draw(distinct_trees(40, vocabulary))
    return tree, _target(draw(st.integers(0, 2**32 - 1)), vocabulary, draw(st.sampled_from(_KINDS)))


def _full_tree(vocabulary: int, depth: int, root: int = 0) -> TokenTree:
    paths = [np.unravel_index(i, (vocabulary,) * depth) for i in range(vocabulary**depth)]
    return TokenTree.from_paths(root, [([int(t) for t in path], [0.0] * depth) for path in paths])


@given(_cases())
@example((TokenTree.root_only(0), _target(1, 3, "smooth")))
@example((_full_tree(3, 3), _target(2, 3, "smooth")))
@example((_full_tree(2, 5), _target(3, 2, "zeros")))
@example((TokenTree.chain([0, 1, 1, 1, 1]), _target(4, 2, "one hot")))
@example((TokenTree.build([0, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [0] * 5), _target(5, 4, "even")))
@settings(max_examples=60)
def test_the_law_of_the_text_is_the_targets_whatever_the_tree(
    case: tuple[TokenTree, Callable[[Text], np.ndarray]],
) -> None:
    tree, chances = case
    root = int(tree.tokens[0])
    accepted: Law = defaultdict(float)
    for acceptance, weight in _outcomes(tree, chances):
        accepted[(*text_of(tree, acceptance.path[-1]), acceptance.bonus)] += weight
    law = _continued(accepted, chances, _LENGTH + 1)
    expected = _continued({(root,): 1.0}, chances, _LENGTH + 1)
    assert law.keys() == expected.keys()
    assert all(abs(law[text] - expected[text]) < 1e-12 for text in expected)


@given(_cases())
@settings(max_examples=30)
def test_a_pass_accepts_all_that_the_tree_holds_of_the_targets_choices(
    case: tuple[TokenTree, Callable[[Text], np.ndarray]],
) -> None:
    tree, chances = case
    for acceptance, _ in _outcomes(tree, chances):
        assert list(acceptance.path) == tree.path(acceptance.path[-1])
        assert tree.child(acceptance.path[-1], acceptance.bonus) is None


def test_expected_tokens_are_one_and_the_chances_of_the_nodes() -> None:
    chances = _target(9, 3, "smooth")
    tree = _full_tree(3, 2)
    mean = sum(weight * len(acceptance.path) for acceptance, weight in _outcomes(tree, chances))
    assert mean == pytest.approx(3.0)
    chain = TokenTree.chain([0, 1, 2])
    mean = sum(weight * len(acceptance.path) for acceptance, weight in _outcomes(chain, chances))
    assert mean == pytest.approx(1 + chances((0,))[1] * (1 + chances((0, 1))[2]))


# With shared noise not only the law but the text itself is the same.

_VOCABULARY = 6
_CONFIGS = st.one_of(
    st.just(GenerationConfig()),
    st.builds(
        GenerationConfig,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.2]),
        repeat_penalty=st.sampled_from([1.0, 1.4]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        penalty_window=st.sampled_from([0, 2, 64]),
    ),
    st.builds(
        GenerationConfig,
        temperature=st.sampled_from([0.0, 0.7, 3.0]),
        min_p=st.sampled_from([0.0, 0.1]),
        top_n_sigma=st.sampled_from([0.0, 1.5]),
        xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
        dry_multiplier=st.sampled_from([0.0, 2.0]),
        dry_allowed_length=st.sampled_from([1, 2, 3]),
        dry_penalty_last_n=st.sampled_from([-1, 10]),
        dry_sequence_breakers=st.sampled_from([(), ("b",), ("cd",)]),
        banned_strings=st.lists(st.sampled_from(["a", "bc", "ddd", "EFA"]), max_size=2),
    ),
)


def _sampler(config: GenerationConfig, seed: int, prompt: list[int]) -> Sampler:
    spelling = Spelling(Letters("abcdef"))
    adjustments = Adjustments(config, _VOCABULARY, spelling, len(prompt))
    return Sampler(config, _VOCABULARY, seed, adjustments=adjustments)


def _decoded(
    sampler: Sampler, logits: Callable[[Text], np.ndarray], prompt: list[int], trees: list[TokenTree]
) -> tuple[list[int], int]:
    """20 tokens, and the passes it took; the trees take turns, with the last token as their root."""
    text, passes = list(prompt), 0
    while len(text) < len(prompt) + 20:
        tree = trees[passes % len(trees)]
        tree = TokenTree.build([text[-1], *tree.tokens[1:]], tree.parents, tree.logprobs)
        before = tuple(text[:-1])

        def choose(node: int, tree: TokenTree = tree, before: Text = before) -> int:
            so_far = (*before, *text_of(tree, node))
            return sampler.choose(logits(so_far), so_far)

        acceptance = sample_and_match(tree, choose)
        text += [int(tree.tokens[node]) for node in acceptance.path[1:]] + [acceptance.bonus]
        passes += 1
    return text[len(prompt) :][:20], passes


@given(
    config=_CONFIGS,
    seed=st.integers(0, 2**64 - 1),
    target=st.integers(0, 2**32 - 1),
    prompt=st.lists(st.integers(0, _VOCABULARY - 1), min_size=1, max_size=5),
    trees=st.lists(distinct_trees(60, _VOCABULARY), min_size=1, max_size=4),
)
def test_the_same_seed_gives_the_same_text_whatever_the_trees(
    config: GenerationConfig, seed: int, target: int, prompt: list[int], trees: list[TokenTree]
) -> None:
    @cache
    def logits(text: Text) -> np.ndarray:
        rng = np.random.default_rng([target, len(text), *text[-2:]])
        return rng.normal(scale=2, size=_VOCABULARY).astype(np.float32)

    plain, passes = _decoded(_sampler(config, seed, prompt), logits, prompt, [TokenTree.root_only(0)])
    assert passes == 20
    drafted, passes = _decoded(_sampler(config, seed, prompt), logits, prompt, trees)
    assert drafted == plain
    assert passes <= 20
    text = Letters("abcdef").text(plain)
    assert not any(string.lower() in text for string in config.banned_strings)


def test_trees_do_save_passes() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=_VOCABULARY).astype(np.float32)
    sampler = Sampler(GenerationConfig(temperature=1), _VOCABULARY, 1)
    _, passes = _decoded(sampler, lambda text: logits, [0], [_full_tree(_VOCABULARY, 3)])
    assert passes == 5
