"""Best-first growth: the best nodes under a budget, and no draft step too many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.speculation.growth import Children, ExpansionPolicy, Frontier, TreeLimits
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.tree_search import TreeSearch, grow, grow_together
from tests.unit.strategies import assert_well_formed, texts_of

_ROOT = 7
_KINDS = ("smooth", "ties", "zeros", "one hot")
Path = tuple[int, ...]


class _Drafter:
    """A fixed random distribution after every text, and a record of what was asked."""

    def __init__(self, seed: int, kind: str, vocabulary: int, branching: int) -> None:
        self.steps: list[list[Path]] = []
        self.frontiers: list[Frontier] = []
        self._seed, self._kind, self._vocabulary = seed, kind, vocabulary
        self._branching = min(branching, vocabulary)
        self._paths: dict[int, Path] = {0: (_ROOT,)}

    def logprobs(self, path: Path) -> np.ndarray:
        rng = np.random.default_rng([self._seed, *path])
        with np.errstate(divide="ignore"):
            if self._kind == "ties":
                chances = rng.permutation([0.5, 0.25, 0.125, 0.125][: self._vocabulary])
            elif self._kind == "one hot":
                chances = np.eye(self._vocabulary)[rng.integers(self._vocabulary)]
            else:
                chances = rng.exponential(size=self._vocabulary) ** 3
                if self._kind == "zeros":
                    chances *= rng.random(self._vocabulary) < 0.6
                chances /= max(chances.sum(), 1e-30)
            return np.log(chances).astype(np.float32)

    def children(self, path: Path) -> list[tuple[int, np.float32]]:
        logprobs = self.logprobs(path)
        best = np.argsort(-logprobs, kind="stable")[: self._branching]
        return [(int(token), logprobs[token]) for token in best]

    def expand(self, frontier: Frontier) -> Children:
        step = []
        for node, token, parent, depth in zip(
            frontier.nodes, frontier.tokens, frontier.parents, frontier.depths, strict=True
        ):
            if node:
                self._paths[int(node)] = (*self._paths[int(parent)], int(token))
            assert len(self._paths[int(node)]) == depth + 1
            step.append(self._paths[int(node)])
        self.steps.append(step)
        rows = [self.children(path) for path in step]
        return Children(
            np.array([[token for token, _ in row] for row in rows], dtype=np.int32),
            np.array([[score for _, score in row] for row in rows], dtype=np.float32),
        )

    @property
    def expanded(self) -> list[Path]:
        return [path for step in self.steps for path in step]

    def everything(self, depth: int) -> dict[Path, float]:
        """Every text with a chance, to a depth, with its score."""
        layer = {(_ROOT,): np.float32(0)}
        found = dict(layer)
        for _ in range(depth):
            layer = {
                (*path, token): score + logprob
                for path, score in layer.items()
                for token, logprob in self.children(path)
                if logprob > -np.inf
            }
            found |= layer
        return {path: float(score) for path, score in found.items()}


_DRAFTERS = st.builds(
    _Drafter,
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(_KINDS),
    vocabulary=st.integers(2, 4),
    branching=st.just(8),
)


@given(
    _DRAFTERS,
    st.one_of(st.integers(1, 80), st.just(128)),
    st.integers(0, 4),
    st.sampled_from([1, 2, 5, 1000]),
)
def test_grows_the_likeliest_nodes_whatever_the_budget(
    drafter: _Drafter, budget: int, depth: int, width: int
) -> None:
    limits = TreeLimits(budget, depth=depth, leaves=1000, width=width)
    tree = grow(_ROOT, drafter.expand, limits)
    everything = drafter.everything(depth)
    assert sorted(tree.logprobs.tolist()) == sorted(everything.values())[-budget:]
    assert texts_of(tree).items() <= everything.items()
    assert_well_formed(tree)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32 - 1), st.integers(96, 256), st.sampled_from([16, 32]), st.sampled_from([40, 64, 256])
)
def test_large_trees_are_the_likeliest_nodes_within_their_leaves(
    seed: int, budget: int, width: int, leaves: int
) -> None:
    drafter = _Drafter(seed, "smooth", vocabulary=8, branching=8)
    limits = TreeLimits(budget, depth=16, leaves=leaves, width=width)
    tree = grow(_ROOT, drafter.expand, limits)
    assert_well_formed(tree)
    assert len(tree.leaves) <= leaves
    best = sorted(drafter.everything(3).values())
    if leaves >= budget:
        assert len(tree) == budget
        worst = float(tree.logprobs.min())
        better = [score for score in best if score > worst]
        shallow = [score for score, depth in zip(tree.logprobs, tree.depths, strict=True) if depth <= 3]
        assert sorted(float(score) for score in shallow if score > worst) == better
    assert max(len(step) for step in drafter.steps) <= width


@given(_DRAFTERS, st.integers(1, 60), st.integers(1, 4), st.floats(-6, 0))
def test_nodes_not_above_the_least_score_are_left_out(
    drafter: _Drafter, budget: int, depth: int, least: float
) -> None:
    limits = TreeLimits(budget, depth=depth, leaves=1000, min_logprob=least)
    tree = grow(_ROOT, drafter.expand, limits)
    good = [
        score
        for path, score in drafter.everything(depth).items()
        if path == (_ROOT,) or np.float32(score) > np.float32(least)
    ]
    assert sorted(tree.logprobs.tolist()) == sorted(good)[-budget:]


@given(_DRAFTERS, st.integers(1, 60), st.integers(1, 60), st.integers(1, 4), st.floats(-6, 0))
def test_free_nodes_are_kept_however_they_score(
    drafter: _Drafter, budget: int, free: int, depth: int, least: float
) -> None:
    free = min(free, budget)
    limits = TreeLimits(budget, depth=depth, leaves=1000, min_logprob=least, free_nodes=free)
    tree = grow(_ROOT, drafter.expand, limits)
    scores = sorted(drafter.everything(depth).values(), reverse=True)
    good = max(sum(np.float32(score) > np.float32(least) for score in scores), free)
    assert sorted(tree.logprobs.tolist(), reverse=True) == scores[: min(good, budget)]


@given(_DRAFTERS, st.integers(1, 60), st.integers(2, 8), st.integers(1, 4), st.floats(-6, -0.01))
def test_the_last_nodes_of_a_tree_are_worth_the_rows_that_a_pass_takes_for_them(
    drafter: _Drafter, budget: int, rows: int, depth: int, least: float
) -> None:
    limits = TreeLimits(budget, depth=depth, leaves=1000, min_logprob=least)
    whole = sorted(grow(_ROOT, drafter.expand, limits).logprobs.tolist(), reverse=True)
    kept = sorted(
        grow(_ROOT, drafter.expand, replace(limits, row_multiple=rows)).logprobs.tolist(), reverse=True
    )
    last = len(whole) % rows
    if len(whole) == budget or not last:
        assert kept == whole
        return
    # The next best children of expanded nodes fill the last row; others were never looked at.
    seen = {
        path: score
        for path, score in drafter.everything(depth).items()
        if path[:-1] in drafter.expanded or path == (_ROOT,)
    }
    filled = sorted(seen.values(), reverse=True)[: min(len(whole) - last + rows, budget)]
    worth = sum(math.exp(score) for score in filled[len(whole) - last :])
    if worth > rows * math.exp(least) * (1 + 1e-5):
        assert kept == filled
    elif worth < rows * math.exp(least) * (1 - 1e-5):
        assert kept == whole[: max(len(whole) - last, 1)]


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(_KINDS),
    budget=st.integers(1, 60),
    depth=st.integers(0, 10),
    leaves=st.integers(1, 12),
    width=st.integers(1, 9),
    branching=st.integers(1, 4),
    least=st.sampled_from([-math.inf, -4.0, -1.0]),
)
def test_every_limit_is_kept(
    seed: int, kind: str, budget: int, depth: int, leaves: int, width: int, branching: int, least: float
) -> None:
    drafter = _Drafter(seed, kind, 4, branching)
    limits = TreeLimits(budget, depth, leaves, width, branching, least)
    tree = grow(_ROOT, drafter.expand, limits)
    assert_well_formed(tree)
    assert len(tree) <= budget
    assert tree.depths.max() <= depth
    assert len(tree.leaves) <= leaves
    assert np.bincount(tree.parents[1:], minlength=1).max() <= branching
    assert (tree.logprobs[1:] > least).all()
    assert all(0 < len(step) <= width for step in drafter.steps)
    assert all(len(path) <= depth for path in drafter.expanded)


@given(_DRAFTERS, st.integers(1, 60), st.integers(1, 6), st.integers(1, 9))
def test_each_step_expands_the_best_open_nodes_that_could_contribute(
    drafter: _Drafter, budget: int, depth: int, width: int
) -> None:
    grow(_ROOT, drafter.expand, TreeLimits(budget, depth=depth, width=width))
    assert len(set(drafter.expanded)) == len(drafter.expanded), "no node is expanded twice"
    known = {(_ROOT,): np.float32(0)}
    opened: set[Path] = set()
    for step in drafter.steps:
        ranked = sorted(known.values())
        bar = ranked[-budget] if len(ranked) >= budget else -math.inf
        could = sorted(
            (known[path] for path in known.keys() - opened if len(path) <= depth and known[path] > bar),
            reverse=True,
        )
        assert [known[path] for path in step] == could[:width]
        opened |= set(step)
        known |= {
            (*path, token): known[path] + logprob
            for path in step
            for token, logprob in drafter.children(path)
            if logprob > -np.inf
        }


@given(st.integers(0, 2**32 - 1), st.integers(2, 60))
def test_one_node_a_step_expands_only_nodes_above_the_worst_one_kept(seed: int, budget: int) -> None:
    drafter = _Drafter(seed, "smooth", 4, 8)
    tree = grow(_ROOT, drafter.expand, TreeLimits(budget, depth=50, width=1))
    assert len(tree) == budget
    worst = tree.logprobs.min()
    needed = {path for path, score in texts_of(tree).items() if score > worst}
    assert set(drafter.expanded) == needed


@pytest.mark.parametrize(
    "limits",
    [TreeLimits(1), TreeLimits(8, depth=0), TreeLimits(8, min_logprob=0.0)],
    ids=["budget", "depth", "least score"],
)
def test_nothing_is_drafted_where_nothing_could_be_kept(limits: TreeLimits) -> None:
    drafter = _Drafter(0, "smooth", 4, 8)
    assert texts_of(grow(_ROOT, drafter.expand, limits)) == {(_ROOT,): 0}
    assert drafter.steps == []


def test_a_drafter_that_finds_nothing_leaves_the_root() -> None:
    calls = []

    def expand(frontier: Frontier) -> Children:
        calls.append(frontier)
        return Children.none(len(frontier.nodes))

    assert texts_of(grow(_ROOT, expand, TreeLimits(8))) == {(_ROOT,): 0}
    assert len(calls) == 1


def test_a_score_above_certainty_counts_as_certain() -> None:
    def expand(frontier: Frontier) -> Children:
        shape = (len(frontier.nodes), 1)
        return Children(np.ones(shape, dtype=np.int32), np.full(shape, 1e-3, dtype=np.float32))

    tree = grow(_ROOT, expand, TreeLimits(4))
    assert tree.logprobs.tolist() == [0, 0, 0, 0]
    assert tree.depths.tolist() == [0, 1, 2, 3]


def test_limits_say_whether_drafting_is_allowed() -> None:
    limits = TreeLimits(budget=2, depth=1)
    assert limits.allows_drafting
    assert not replace(limits, budget=1).allows_drafting
    assert not replace(limits, depth=0).allows_drafting


@given(seed=st.integers(0, 2**31), kind=st.sampled_from(_KINDS), budget=st.integers(2, 20))
def test_nothing_grows_below_a_token_that_ends_the_answer(seed: int, kind: str, budget: int) -> None:
    ends = 1

    def grown(expansion: ExpansionPolicy) -> tuple[_Drafter, TokenTree]:
        drafter = _Drafter(seed, kind, vocabulary=4, branching=3)
        bounds = TreeLimits(budget, branching=3, expansion=expansion, is_end=lambda tokens: tokens == ends)
        return drafter, grow(_ROOT, drafter.expand, bounds)

    drafter, tree = grown(ExpansionPolicy())
    assert ends not in tree.tokens[1:], "the target says it for itself"
    assert all(ends not in path[1:] for step in drafter.steps for path in step)
    drafter, tree = grown(ExpansionPolicy(keeps_ends=True))
    assert all(ends not in path[1:] for step in drafter.steps for path in step)
    above = tree.parents[1:]
    assert not (tree.tokens[above[above > 0]] == ends).any()
    assert_well_formed(tree)


def test_a_root_that_ends_something_is_drafted_below() -> None:
    """Such as a prompt that closes a turn."""
    drafter = _Drafter(3, "smooth", vocabulary=4, branching=3)
    bounds = TreeLimits(8, branching=3, is_end=lambda tokens: tokens == _ROOT)
    assert len(grow(_ROOT, drafter.expand, bounds)) > 1


def _together(drafters: list[_Drafter], each: TreeLimits, all_of_them: TreeLimits) -> list[TokenTree]:
    def expand(frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
        return [drafters[index].expand(frontier) for index, frontier in frontiers]

    return grow_together([TreeSearch(_ROOT, each) for _ in drafters], expand, all_of_them)


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(_KINDS)), min_size=1, max_size=5),
    st.integers(0, 60),
    st.integers(0, 3),
    st.sampled_from([1, 3, 1000]),
    st.floats(-6, 0),
)
def test_trees_that_share_a_pass_hold_the_likeliest_nodes_of_all(
    kinds: list[tuple[int, str]], further: int, depth: int, width: int, least: float
) -> None:
    drafters = [_Drafter(seed, kind, 3, 8) for seed, kind in kinds]
    limits = TreeLimits(len(drafters) + further, depth=depth, leaves=1000, width=width, min_logprob=least)
    trees = _together(drafters, limits, limits)
    below = [
        score
        for drafter in drafters
        for path, score in drafter.everything(depth).items()
        if path != (_ROOT,) and np.float32(score) > np.float32(least)
    ]
    best = [0.0] * len(drafters) + sorted(below, reverse=True)[:further]
    assert sorted((score for tree in trees for score in tree.logprobs.tolist()), reverse=True) == best
    assert sum(map(len, trees)) <= limits.budget
    for tree, drafter in zip(trees, drafters, strict=True):
        assert texts_of(tree).items() <= drafter.everything(depth).items()
        assert_well_formed(tree)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=5), st.integers(2, 40), st.integers(0, 20))
def test_trees_that_share_a_pass_share_its_leaves(seeds: list[int], further: int, leaves: int) -> None:
    drafters = [_Drafter(seed, "smooth", 4, 8) for seed in seeds]
    limits = TreeLimits(len(drafters) + further, depth=4, leaves=len(drafters) + leaves)
    trees = _together(drafters, limits, limits)
    assert sum(len(tree.leaves) for tree in trees) <= limits.leaves
    assert sum(map(len, trees)) > len(trees)


def test_rows_go_to_the_text_that_has_the_better_use_for_them() -> None:
    sure, unsure = _Drafter(0, "one hot", 4, 8), _Drafter(1, "ties", 4, 8)
    limits = TreeLimits(8, depth=6)
    trees = _together([unsure, sure], limits, limits)
    assert [len(tree) for tree in trees] == [1, 7]


def test_a_shared_draft_step_is_taken_while_its_gain_is_worth_it_for_all_together() -> None:
    """Three texts that gain a half each are worth a step that one of them is not."""
    limits = TreeLimits(40, depth=3, min_gain=0.9)
    alone, many = _Drafter(2, "ties", 4, 8), [_Drafter(seed, "ties", 4, 8) for seed in (2, 3, 4)]
    _together([alone], limits, limits)
    _together(many, limits, limits)
    assert len(many[0].steps) > len(alone.steps)


@given(_DRAFTERS, st.integers(2, 30), st.sets(st.integers(0, 3), max_size=3))
def test_what_is_known_is_expanded_without_a_step_that_pays(
    drafter: _Drafter, budget: int, tokens: set[int]
) -> None:
    """A step is worth nothing here, so that only the root and what is known below it are expanded."""
    limits = TreeLimits(budget, depth=4, leaves=1000, min_gain=0.999999)

    def known(_: int, frontier: Frontier) -> np.ndarray:
        return np.isin(frontier.tokens, list(tokens))

    def expand(frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
        return [drafter.expand(frontier) for _, frontier in frontiers]

    (tree,) = grow_together([TreeSearch(_ROOT, limits)], expand, replace(limits, width=1), known)
    least = tree.logprobs.min()
    for path, score in texts_of(tree).items():
        if set(path[1:]) <= tokens and len(path) <= 4 and score > least:
            assert path in drafter.expanded
    unknown = [path for path in drafter.expanded[1:] if path[-1] not in tokens]
    chances = [math.exp(drafter.everything(4)[path]) for path in unknown]
    assert all(chance > 0.99 for chance in chances)


@pytest.mark.parametrize(("chance", "steps"), [(0.95, 8), (0.7, 2)])
def test_a_step_must_pay_by_what_earlier_steps_have_added(chance: float, steps: int) -> None:
    """Both are behind one token of probability 0.6: only where children have most of it, does a step pay."""
    drafter = _Chain([0.6, *[chance] * 12])
    tree = grow(_ROOT, drafter.expand, TreeLimits(64, depth=16, min_gain=0.35, min_logprob=math.log(0.05)))
    assert drafter.steps == steps
    assert len(tree) == steps + 1


class _Chain:
    """A drafter with one candidate at each depth, of these probabilities."""

    def __init__(self, chances: Sequence[float]) -> None:
        self.steps = 0
        self._chances = np.array(chances, dtype=np.float32)

    def expand(self, frontier: Frontier) -> Children:
        self.steps += 1
        depths = frontier.depths[:, None]
        return Children(depths.astype(np.int32), np.log(self._chances[depths]))


@pytest.mark.parametrize("hidden", range(4))
def test_steps_that_take_no_time_need_not_pay(hidden: int) -> None:
    """Their cost is used up step by step; a step that is not hidden would never pay here."""
    drafter = _Drafter(2, "ties", 4, 8)
    limits = TreeLimits(64, depth=9, width=3, min_gain=2.0, row_gain=0.1, overlap_budget=2.3 * hidden + 0.01)
    grow(_ROOT, drafter.expand, limits)
    # Three nodes a step, but for the first, which has the root alone and leaves a little.
    assert len(drafter.steps) == hidden
