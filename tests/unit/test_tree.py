"""The token tree: what llama.cpp is told about it, and the set algebra of its paths."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.llama.runtime.batch import TokenBatch, tree_batch
from edgespec.speculation.tree import TokenTree
from tests.unit.strategies import ancestry, assert_well_formed, distinct_trees, text_of, texts_of, trees

_STARTS = st.integers(0, 100_000)


def _ids(batch: TokenBatch, row: int) -> list[int]:
    return batch.sequence_ids[batch.offsets[row] : batch.offsets[row + 1]].tolist()


def _membership(batch: TokenBatch) -> np.ndarray:
    """(rows, ids) bool."""
    member = np.zeros((len(batch), int(batch.sequence_ids.max()) + 1), dtype=bool)
    for row in range(len(batch)):
        member[row, _ids(batch, row)] = True
    return member


# What llama.cpp is told.


@given(trees(), _STARTS)
def test_llama_cpp_lets_every_node_see_its_ancestors_and_itself(tree: TokenTree, start: int) -> None:
    batch = tree_batch(tree, start)
    first = [_ids(batch, row)[0] for row in range(len(batch))]
    shares = _membership(batch)[:, first].T  # [i, j]: row i's first id is among row j's ids
    not_later = batch.positions[None, :] <= batch.positions[:, None]
    assert np.array_equal(shares & not_later, ancestry(tree))


@given(trees(), _STARTS)
def test_batch_passes_the_checks_of_llama_cpp(tree: TokenTree, start: int) -> None:
    batch = tree_batch(tree, start)
    n_leaves = len(tree.leaves)
    current = [set(range(n_leaves))] * n_leaves
    positions: list[list[int]] = [[] for _ in range(n_leaves)]
    for row in range(len(batch)):
        ids = _ids(batch, row)
        assert ids, "every row belongs to a sequence"
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(range(n_leaves))
        for i in ids:
            assert set(ids) <= current[i], "the sets along a path only shrink"
            current[i] = set(ids)
            positions[i].append(int(batch.positions[row]))
    for column in positions:
        assert column == list(range(start, start + len(column)))


@given(trees(), _STARTS)
def test_batch_holds_the_nodes_in_order(tree: TokenTree, start: int) -> None:
    batch = tree_batch(tree, start)
    assert np.array_equal(batch.tokens, tree.tokens)
    assert batch.positions.tolist() == [start + len(tree.path(node)) - 1 for node in range(len(tree))]
    assert batch.wants_logits.all()
    assert batch.positions.dtype == batch.sequence_ids.dtype == batch.tokens.dtype == np.int32


@given(trees())
def test_each_leaf_has_the_number_of_its_place_among_the_leaves(tree: TokenTree) -> None:
    batch = tree_batch(tree, 0)
    for number, leaf in enumerate(tree.leaves):
        assert _ids(batch, int(leaf)) == [number]
    assert _ids(batch, 0) == list(range(len(tree.leaves)))


# Looking at a tree.


@given(trees())
def test_path_child_leaves_and_depths_agree_with_the_parents(tree: TokenTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0
        assert path[-1] == node
        assert [int(tree.parents[i]) for i in path[1:]] == path[:-1]
        assert tree.depths[node] == len(path) - 1
    assert set(tree.leaves.tolist()) == set(range(len(tree))) - set(tree.parents.tolist())


@given(distinct_trees(60), st.integers(0, 59), st.integers(0, 5))
def test_child_is_the_node_below_that_holds_the_token(tree: TokenTree, node: int, token: int) -> None:
    below = [i for i in range(len(tree)) if tree.parents[i] == node and tree.tokens[i] == token]
    assert tree.child(node, token) == (below[0] if below else None)


def test_the_root_is_nobodys_child() -> None:
    assert TokenTree.root_only(7).child(-1, 3) is None
    assert TokenTree.root_only(7).child(0, 7) is None


# Making trees.


@pytest.mark.parametrize(
    ("tokens", "parents", "logprobs", "message"),
    [
        ([], [], [], "tokens, parents and logprobs must have one entry per node, at least one"),
        ([1, 2], [-1], [0, 0], "tokens, parents and logprobs must have one entry per node"),
        ([1, 2], [-1, 0], [0], "tokens, parents and logprobs must have one entry per node"),
        ([1], [0], [0], "node 0, and only node 0, has no parent"),
        ([1, 2], [-1, -1], [0, 0], "node 0, and only node 0, has no parent"),
        ([1, 2], [-1, -2], [0, 0], "node 0, and only node 0, has no parent"),
        ([1, 2], [-1, 1], [0, 0], "a parent must come before its children"),
        ([1, 2, 3], [-1, 2, 0], [0, 0, 0], "a parent must come before its children"),
        ([1, 2], [-1, 9], [0, 0], "a parent must come before its children"),
    ],
)
def test_build_refuses_what_is_no_tree(
    tokens: list[int], parents: list[int], logprobs: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.build(tokens, parents, logprobs)


def test_chain_and_root_only() -> None:
    chain = TokenTree.chain([5, 6, 5], [0, -1, -2])
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.depths.tolist() == [0, 1, 2]
    assert chain.logprobs.tolist() == [0, -1, -2]
    assert chain.leaves.tolist() == [2]
    assert TokenTree.chain([5, 6]).logprobs.tolist() == [0, 0]
    assert texts_of(TokenTree.root_only(9)) == {(9,): 0}


_PATHS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12)


@given(_PATHS)
def test_from_paths_holds_every_prefix_once(paths: list[list[int]]) -> None:
    scored = [(path, [-0.5 * (i + 1) - k for i in range(len(path))]) for k, path in enumerate(paths)]
    expected = {(9,): 0.0}
    for path, scores in scored:
        for i, score in enumerate(scores):
            prefix = (9, *path[: i + 1])
            expected[prefix] = max(expected.get(prefix, -np.inf), score)
    tree = TokenTree.from_paths(9, scored)
    assert texts_of(tree) == expected
    assert_well_formed(tree)


def test_from_paths_wants_a_score_for_every_token() -> None:
    with pytest.raises(ValueError, match="zip"):
        TokenTree.from_paths(1, [([2, 3], [0.0])])


# Merging.


@given(trees(vocabulary=3))
def test_merged_keeps_the_paths_and_their_best_scores_once(tree: TokenTree) -> None:
    merged = tree.merged()
    assert texts_of(merged) == texts_of(tree)
    assert len(merged) == len(texts_of(tree))
    assert_well_formed(merged)
    assert merged.merged() is merged


@given(trees(100, vocabulary=3, root=1), trees(100, vocabulary=3, root=1))
def test_union_is_the_union_of_the_paths(a: TokenTree, b: TokenTree) -> None:
    ours, theirs = texts_of(a), texts_of(b)
    joined = a.union(b)
    assert texts_of(joined) == {
        text: max(ours.get(text, -np.inf), theirs.get(text, -np.inf)) for text in ours.keys() | theirs.keys()
    }
    assert_well_formed(joined)
    assert texts_of(b.union(a)) == texts_of(joined)
    assert texts_of(a.union(a)) == ours
    assert texts_of(joined.union(b)) == texts_of(joined)


@given(trees(20, root=1), trees(20, root=2))
def test_trees_of_different_roots_have_no_union(a: TokenTree, b: TokenTree) -> None:
    with pytest.raises(ValueError, match="trees of different roots cannot be merged"):
        a.union(b)


# Trimming.


def _score_multiset(tree: TokenTree) -> list[float]:
    return sorted(tree.logprobs.tolist())


@given(distinct_trees(), st.integers(1, 310), st.integers(1, 310), st.none() | st.integers(0, 20))
def test_trimmed_is_a_part_of_the_tree_within_its_limits(
    tree: TokenTree, budget: int, leaves: int, depth: int | None
) -> None:
    trimmed = tree.trimmed(budget, leaves, depth)
    assert len(trimmed) <= budget
    assert len(trimmed.leaves) <= leaves
    assert depth is None or trimmed.depths.max() <= depth
    assert_well_formed(trimmed)
    assert texts_of(trimmed).items() <= texts_of(tree).items()


@given(distinct_trees(9, vocabulary=4), st.integers(1, 9))
@settings(max_examples=60)
def test_trimmed_is_the_best_choice_within_a_node_budget(tree: TokenTree, budget: int) -> None:
    # Every choice of nodes that is closed under parents, by brute force.
    size = min(budget, len(tree))
    best = max(
        float(tree.logprobs[list(choice)].sum())
        for rest in combinations(range(1, len(tree)), size - 1)
        for choice in [(0, *rest)]
        if all(tree.parents[node] in choice for node in rest)
    )
    trimmed = tree.trimmed(budget, leaves=len(tree))
    assert len(trimmed) == size
    assert float(trimmed.logprobs.sum()) == best


@given(distinct_trees(), st.integers(1, 300))
def test_a_node_budget_keeps_the_highest_scores(tree: TokenTree, budget: int) -> None:
    trimmed = tree.trimmed(budget, leaves=len(tree))
    assert _score_multiset(trimmed) == _score_multiset(tree)[-budget:]


@given(distinct_trees(), st.integers(1, 20))
def test_a_leaf_limit_costs_no_more_nodes_than_it_must(tree: TokenTree, leaves: int) -> None:
    trimmed = tree.trimmed(len(tree), leaves)
    kept = texts_of(trimmed)
    if len(trimmed.leaves) < leaves:
        assert len(trimmed) == len(tree)
    # A child that is left out would always have been one leaf too many: no leaf could be extended.
    tips = {text_of(trimmed, int(leaf)) for leaf in trimmed.leaves}
    assert not any(text[:-1] in tips for text in texts_of(tree) if text not in kept)


@given(distinct_trees(), st.integers(0, 10))
def test_trimmed_returns_the_tree_itself_where_nothing_binds(tree: TokenTree, spare: int) -> None:
    depth = int(tree.depths.max()) + spare
    assert tree.trimmed(len(tree) + spare, len(tree.leaves) + spare, depth) is tree


def test_ties_go_to_the_parent() -> None:
    tree = TokenTree.build([0, 1, 2, 3], [-1, 0, 1, 0], [0, -1, -1, -1])
    assert texts_of(tree.trimmed(2)) == {(0,): 0, (0, 1): -1}
    assert texts_of(tree.trimmed(3)) == {(0,): 0, (0, 1): -1, (0, 1, 2): -1}


@given(distinct_trees(60), st.integers(0, 59))
def test_rerooted_is_what_follows_a_node(tree: TokenTree, node: int) -> None:
    node %= len(tree)
    rest = tree.rerooted(node)
    start, score = text_of(tree, node), tree.logprobs[node]
    expected = {
        text[len(start) - 1 :]: known - score
        for text, known in texts_of(tree).items()
        if text[: len(start)] == start
    }
    assert texts_of(rest) == expected
    kept = tree.below(node)
    assert rest.tokens.tolist() == tree.tokens[kept].tolist()
    assert (rest.depths == tree.depths[kept] - tree.depths[node]).all()


@given(trees(60), st.integers(0, 59), st.integers(0, 59))
def test_rerooted_twice_is_rerooted_once(tree: TokenTree, node: int, further: int) -> None:
    """Also where siblings hold equal tokens."""
    node %= len(tree)
    kept, rest = tree.below(node), tree.rerooted(node)
    further %= len(rest)
    once, twice = tree.rerooted(int(kept[further])), rest.rerooted(further)
    assert twice.tokens.tolist() == once.tokens.tolist()
    assert twice.parents.tolist() == once.parents.tolist()
    assert twice.logprobs == pytest.approx(once.logprobs)


def test_rerooted_at_the_root_is_the_tree_itself() -> None:
    tree = TokenTree.build([1, 2, 3], [-1, 0, 1], [0.0, -1.0, -np.inf])
    assert texts_of(tree.rerooted(0)) == texts_of(tree)
    assert tree.rerooted(2).logprobs.tolist() == [-np.inf]
