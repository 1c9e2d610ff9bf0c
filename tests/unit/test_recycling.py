"""Recycled tokens: what the target said in earlier passes, and what of it is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.speculation.drafters.merging import observed, target_rows
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.evidence import RecycledFrom, recycled_classes
from edgespec.speculation.growth import Frontier, TreeLimits
from edgespec.speculation.ranking import ProbabilityRanking
from edgespec.speculation.sources.base import KEPT_OF_ROWS, TargetRows
from edgespec.speculation.sources.recycling import RecycledSource, Successors, _pair_keys
from edgespec.speculation.tree import TokenTree
from tests.unit.strategies import distinct_trees, texts_of

_RANKING = ProbabilityRanking()  # nothing is ranked: there are no logits


def _rows(tokens: list[list[int]], chance: float = 0.4) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(tokens, dtype=np.int32)
    return array, np.full(array.shape, chance, dtype=np.float32)


def _ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def _root(token: int) -> Frontier:
    return Frontier(_ids(0), _ids(token), _ids(-1), _ids(0))


_PASSES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 5),
        st.lists(st.integers(0, 300), min_size=1, max_size=40, unique=True),
    ),
    max_size=30,
)


def _after(successors: Successors, before: int, last: int) -> list[dict[int, int]]:
    """Candidates after two tokens: of both, and of the last one."""
    pair: list[dict[int, int]] = [{}]
    token: list[dict[int, int]] = [{}]
    successors.join(_pair_keys(_ids(before), _ids(last)), RecycledFrom.PAIR, pair, RecycledFrom.PAIR)
    successors.join(_ids(last).astype(np.uint64), RecycledFrom.TOKEN, token, RecycledFrom.TOKEN)
    return pair + token


@given(_PASSES)
def test_the_latest_successors_are_kept(passes: list[tuple[int, int, list[int]]]) -> None:
    successors = Successors()
    of_pair: dict[tuple[int, int], list[int]] = {}
    of_token: dict[int, list[int]] = {}
    for before, last, tokens in passes:
        successors.put(_ids(before), _ids(last), *_rows([tokens]))
        of_pair[before, last] = of_token[last] = tokens[:KEPT_OF_ROWS]
    for before in range(6):
        for last in range(6):
            pair, token = _after(successors, before, last)
            assert list(pair) == of_pair.get((before, last), [])
            assert list(token) == of_token.get(last, [])


@given(st.lists(st.tuples(st.integers(0, 150_000), st.integers(0, 150_000)), min_size=1, max_size=50))
def test_no_context_gets_the_successors_of_another(contexts: list[tuple[int, int]]) -> None:
    successors = Successors()
    before, last = np.array(contexts, dtype=np.int32).T
    successors.put(before, last, *_rows([[token + 1] for token in last.tolist()]))
    for one, token in contexts:
        assert all(found.keys() <= {token + 1} for found in _after(successors, one, token))
        assert _after(successors, one, token + 1_000_000) == [{}, {}]


def test_after_a_token_that_is_new_come_its_rivals() -> None:
    source = RecycledSource()
    chances = np.array([[0.6, 0.3, 0.1]], dtype=np.float32)
    source.observe([2, 3], TokenTree.root_only(3), TargetRows(_ids(0), np.array([[10, 11, 12]]), chances))
    (found,) = source.propose([2, 3, 10], 4).below(_root(10))
    assert list(found) == [11, 12], "not the token itself"
    assert found[11] == recycled_classes(np.float32(0.3), RecycledFrom.RIVAL)


def test_below_the_root_the_path_decides() -> None:
    source = RecycledSource()
    for before, last, then in ((2, 3, 10), (3, 10, 11), (10, 11, 12)):
        tokens, chances = _rows([[then]], 0.9)
        source.observe([before, last], TokenTree.root_only(last), TargetRows(_ids(0), tokens, chances))
    proposals = source.propose([1, 2, 3], 4)
    assert proposals.below(_root(3))[0][10] == recycled_classes(np.float32(0.9), RecycledFrom.PAIR)
    (found,) = proposals.below(Frontier(_ids(1), _ids(10), _ids(0), _ids(1)))
    assert found[11] == recycled_classes(np.float32(0.9), RecycledFrom.PAIR)
    (found,) = proposals.below(Frontier(_ids(2), _ids(11), _ids(1), _ids(2)))
    assert found[12] == recycled_classes(np.float32(0.9), RecycledFrom.PAIR)


def test_it_takes_less_than_two_megabytes() -> None:
    source = RecycledSource()
    assert source._successors.nbytes < 2_000_000
    rng = np.random.default_rng(0)
    for _ in range(50):
        before, last = rng.integers(0, 150_000, (2, 64)).astype(np.int32)
        source._successors.put(before, last, *_rows(rng.integers(0, 150_000, (64, KEPT_OF_ROWS)).tolist()))
    assert source._successors.nbytes < 2_000_000


@given(distinct_trees(max_nodes=30, vocabulary=40), st.integers(0, 2**32 - 1))
def test_what_the_target_said_is_drafted_next_time(tree: TokenTree, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(len(tree), 50)).astype(np.float32)
    text = [3, int(tree.tokens[0])]
    drafter = ProposingDrafter([RecycledSource()])
    drafter.observe(text, tree, logits)
    drafted = texts_of(drafter.draft(text, TreeLimits(KEPT_OF_ROWS + 1, depth=1), _RANKING))
    best = np.argsort(-logits[0], kind="stable")[:KEPT_OF_ROWS].tolist()
    assert set(drafted) == {(text[-1],), *((text[-1], token) for token in best)}


def test_rows_are_the_best_of_the_logits() -> None:
    tree = TokenTree.build([5, 6, 7], [-1, 0, 0], [0.0, -0.1, -2.0])
    logits = np.array([[0, 3, 1, 2], [5, 0, 0, 1], [0, 0, 0, 9]], dtype=np.float32)
    rows = target_rows(tree, logits)
    assert rows.nodes.tolist() == [0, 1, 2]
    assert rows.tokens[:, :2].tolist() == [[1, 3], [0, 3], [3, 0]]
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert rows.chances == pytest.approx(np.take_along_axis(expected, rows.tokens, axis=1))


def test_of_a_large_tree_the_likeliest_nodes_are_kept() -> None:
    scores = np.concatenate([[0.0], np.linspace(-9, -1, 99)])
    tree = TokenTree.build(np.arange(100), [-1, *[0] * 99], scores)
    rows = target_rows(tree, np.eye(100, dtype=np.float32))
    assert len(rows.nodes) == 64
    assert set(rows.nodes.tolist()) == {0, *range(37, 100)}
    assert rows.tokens[:, 0].tolist() == rows.nodes.tolist()


def test_only_sources_that_keep_passes_are_shown_them() -> None:
    class Refusing(RecycledSource):
        keeps_passes = False

        def observe(self, text: object, tree: object, rows: object) -> None:
            raise AssertionError("it was shown a pass")

    observed([Refusing()], [1], TokenTree.root_only(1), np.zeros((1, 9), dtype=np.float32))


def test_logits_that_are_not_finite_are_no_error() -> None:
    drafter = ProposingDrafter([RecycledSource()])
    for value in (np.nan, np.inf, -np.inf):
        drafter.observe([1], TokenTree.root_only(1), np.full((1, 200), value, dtype=np.float32))
        drafter.draft([1], TreeLimits(8), _RANKING)


def test_everything_can_be_forgotten() -> None:
    source = RecycledSource()
    tokens, chances = _rows([[4, 5]])
    source.observe([2, 3], TokenTree.root_only(3), TargetRows(_ids(0), tokens, chances))
    assert set(source.propose([2, 3], 4).below(_root(3))[0]) == {4, 5}
    source.forget()
    assert source.propose([2, 3], 4).below(_root(3)) == [{}]


def test_a_text_of_one_token_has_a_context_too() -> None:
    source = RecycledSource()
    tokens, chances = _rows([[4, 5]])
    source.observe([3], TokenTree.root_only(3), TargetRows(_ids(0), tokens, chances))
    assert set(source.propose([3], 4).below(_root(3))[0]) == {4, 5}
