"""Every tree policy: its shape, its limits, and Sequoia's tree against the paper's dynamic program."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.growth import Children, ExpansionPolicy, Frontier, TreeLimits
from edgespec.speculation.learning.tables import TableStore
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import NAMES, RankAcceptance, tree_policy
from edgespec.speculation.ranking import CalibratedRanking, ProbabilityRanking
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.tree_search import grow
from tests.unit.strategies import assert_well_formed

GREEDY = GenerationConfig()
_MOST = TreeLimits(budget=64, depth=16, width=8)


class RandomDrafter:
    """Random candidates, the same after the same path, and a record of the frontiers."""

    def __init__(self, seed: int, branching: int) -> None:
        self.frontiers: list[Frontier] = []
        self._seed, self._branching = seed, branching
        self._paths: dict[int, tuple[int, ...]] = {0: ()}

    def candidates(self, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self._seed, *path])
        chances = np.sort(rng.dirichlet(np.full(self._branching + 2, 0.3)))[::-1][: self._branching]
        return rng.permutation(self._branching + 2)[: self._branching], np.log(np.maximum(chances, 1e-30))

    def expand(self, frontier: Frontier) -> Children:
        self.frontiers.append(frontier)
        tokens, logprobs = [], []
        for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True):
            if node:
                self._paths[int(node)] = (*self._paths[int(parent)], int(token))
            found = self.candidates(self._paths[int(node)])
            tokens.append(found[0])
            logprobs.append(found[1])
        return Children(np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32))


def grown(name: str, budget: int, seed: int = 0, **fixed: int) -> tuple[TokenTree, RandomDrafter]:
    policy = tree_policy(name)
    limits = policy.clamp(TreeLimits(64, depth=16, width=8), **fixed)
    drafter = RandomDrafter(seed, limits.branching)
    within = TreeLimits(
        budget,
        limits.depth,
        limits.leaves,
        limits.width,
        limits.branching,
        expansion=policy.expansion(GREEDY),
    )
    return grow(5, drafter.expand, within), drafter


@given(st.sampled_from(NAMES), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_every_policy_grows_a_tree_within_its_limits(name: str, budget: int, seed: int) -> None:
    limits = tree_policy(name).clamp(_MOST)
    tree, drafter = grown(name, budget, seed)
    assert_well_formed(tree)
    assert len(tree) <= budget
    assert tree.depths.max() <= limits.depth
    assert len(tree.leaves) <= limits.leaves
    assert all(len(frontier.nodes) <= limits.width for frontier in drafter.frontiers)
    assert np.bincount(tree.parents[1:], minlength=1).max() <= limits.branching


@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_person_can_fix_depth_and_width(name: str, depth: int, width: int, seed: int) -> None:
    tree, drafter = grown(name, 40, seed, depth=depth, width=width)
    assert tree.depths.max() <= depth
    assert max(len(frontier.nodes) for frontier in drafter.frontiers) <= width


def test_a_fixed_depth_may_exceed_the_policys_own() -> None:
    assert tree_policy("eagle2").clamp(_MOST).depth == 6
    assert tree_policy("eagle2").clamp(_MOST, depth=9).depth == 9
    assert tree_policy("calibrated").clamp(_MOST, depth=40).depth == 40
    assert tree_policy("calibrated").clamp(_MOST, depth=400).depth == _MOST.budget


def test_a_chain_is_a_chain_of_first_candidates() -> None:
    tree, drafter = grown("chain", 9)
    assert tree.parents.tolist() == list(range(-1, 8))
    assert len(drafter.frontiers) == 8


def test_sequences_part_at_the_root_only_and_have_equal_lengths() -> None:
    tree, drafter = grown("sequences", 25)
    assert np.bincount(tree.parents[1:]).tolist() == [4] + [1] * 20
    assert tree.depths[tree.leaves].tolist() == [6] * 4
    assert len(drafter.frontiers) == 6


@given(st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_eagle2_expands_the_best_of_each_level_and_reranks_all(budget: int, seed: int) -> None:
    tree, drafter = grown("eagle2", budget, seed)
    assert all((frontier.depths == step).all() for step, frontier in enumerate(drafter.frontiers))
    # The paper's two phases, which expand some nodes needlessly.
    plain = RandomDrafter(seed, 10)
    level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    everything = [0.0]
    for _ in range(6):
        below = []
        for path, score in level:
            tokens, logprobs = plain.candidates(path)
            below += [((*path, int(t)), score + float(p)) for t, p in zip(tokens, logprobs, strict=True)]
        everything += [score for _, score in below]
        level = sorted(below, key=lambda node: -node[1])[:10]
    expected = sorted(everything, reverse=True)[:budget]
    assert sorted(tree.logprobs.tolist(), reverse=True) == pytest.approx(expected, abs=1e-4)


def halves(frontier: Frontier) -> Children:
    """One child below each node, half as likely as the node."""
    shape = (len(frontier.nodes), 1)
    return Children(np.ones(shape, dtype=np.int32), np.full(shape, np.log(0.5), dtype=np.float32))


def test_opt_tree_stops_when_a_level_adds_too_little() -> None:
    expansion = ExpansionPolicy(by_level=True, least_gain=0.1)
    tree = grow(1, halves, TreeLimits(32, expansion=expansion))
    # 0.5, 0.25, 0.125, 0.0625: the fourth level is the first that adds 0.1 or less.
    assert np.exp(tree.logprobs).tolist() == pytest.approx([1, 0.5, 0.25, 0.125, 0.0625])


def test_no_step_is_taken_that_could_not_pay_for_itself() -> None:
    tree = grow(1, halves, TreeLimits(32, min_gain=0.2))
    # The third step would expand 0.25, of which the steps before it have added about two thirds.
    assert np.exp(tree.logprobs).tolist() == pytest.approx([1, 0.5, 0.25])


def _best_expected(shares: tuple[float, ...], nodes: int, depth: int) -> float:
    """Sequoia's dynamic program: most expected tokens of a tree of so many nodes and levels below."""

    @cache
    def tree(n: int, levels: int) -> float:
        return 0.0 if n == 0 else 1 + children(n - 1, levels, 0)

    @cache
    def children(n: int, levels: int, rank: int) -> float:
        if n == 0 or levels == 0 or rank == len(shares):
            return 0.0
        return max(
            shares[rank] * tree(j, levels - 1) + children(n - j, levels, rank + 1) for j in range(n + 1)
        )

    return tree(nodes, depth)


@given(
    st.lists(st.floats(0.001, 0.99), min_size=1, max_size=5),
    st.integers(1, 24),
    st.integers(0, 6),
    st.sampled_from([1, 3, 50]),
)
def test_the_heap_finds_sequoias_best_tree(weights: list[float], nodes: int, depth: int, width: int) -> None:
    total = max(sum(weights), 1.0)
    shares = tuple(sorted((w / total for w in weights), reverse=True))
    acceptance = RankAcceptance(TableStore(), "ranks", len(shares))
    acceptance._usual = np.array(shares)

    def expand(frontier: Frontier) -> Children:
        shape = (len(frontier.nodes), len(shares))
        tokens = np.tile(np.arange(len(shares), dtype=np.int32), (len(frontier.nodes), 1))
        return Children(tokens, np.zeros(shape, dtype=np.float32))

    limits = TreeLimits(
        nodes, depth, width=width, branching=len(shares), expansion=ExpansionPolicy(acceptance)
    )
    tree = grow(0, expand, limits)
    assert tree.expected_accepted + 1 == pytest.approx(_best_expected(shares, nodes, depth), rel=1e-5)


def test_sequoias_shares_are_measured_and_never_rise() -> None:
    acceptance = RankAcceptance(TableStore(), "ranks", 4)
    rng = np.random.default_rng(0)
    truth = np.array([0.3, 0.1, 0.4])  # the third rank does better than the second
    tokens = np.array([[0, 1, 2, 9]], dtype=np.int32)
    row = Children(tokens, np.full((1, 4), -1, dtype=np.float32))
    for _ in range(4000):
        acceptance.learn(row, after=0, token=int(np.searchsorted(np.cumsum(truth), rng.random())))
    assert acceptance.shares[0] == pytest.approx(0.3, abs=0.04)
    assert acceptance.shares[1] == acceptance.shares[2] == pytest.approx(0.1, abs=0.03)
    assert (np.diff(acceptance.shares) <= 0).all()


def test_published_policies_rank_by_probability_and_the_default_by_agreement() -> None:
    noise = GumbelNoise(0, 8)
    for config in (GREEDY, GenerationConfig(temperature=0.7)):
        assert isinstance(tree_policy().ranking(config, noise), CalibratedRanking)
        for name in NAMES[1:]:
            assert isinstance(tree_policy(name).ranking(config, noise), ProbabilityRanking)


def test_an_unknown_policy_is_explained() -> None:
    with pytest.raises(UsageError, match=r"There is no tree policy 'best'\.") as error:
        tree_policy("best")
    assert error.value.hint == f"The policies are {', '.join(NAMES)}."
