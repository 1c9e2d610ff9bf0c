"""Exact numbers of drafted tokens that the lossless rules accept, and their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import method_for
from edgespec.speculation.sampled_trees import by_rank, chain, sequences
from edgespec.speculation.verification.base import excess
from tests.unit.tables import (
    FILTERED,
    PickingDrafter,
    Table,
    TableDrafter,
    fixed,
    limits,
    mean_accepted,
    one_pass,
    pairs,
    table,
)

ROUNDING = 1e-12


def test_speculative_sampling_accepts_what_the_laws_share() -> None:
    target, drafter = fixed([0.5, 0.3, 0.2]), TableDrafter(fixed([0.2, 0.2, 0.6]))
    share = 0.2 + 0.2 + 0.2
    assert mean_accepted("speculative", target, drafter, limits(2), 3) == pytest.approx(share)
    both = share + share**2
    assert mean_accepted("speculative", target, drafter, limits(3), 3) == pytest.approx(both)


def test_k_sequential_selection_with_one_draw_is_speculative_sampling() -> None:
    target, drafter = fixed([0.5, 0.3, 0.2]), TableDrafter(fixed([0.2, 0.2, 0.6]))
    assert mean_accepted("spectr", target, drafter, limits(2), 3) == pytest.approx(0.6)


def test_block_verification_accepts_a_token_that_a_later_one_makes_up_for() -> None:
    """The example of its paper: two tokens, target (1/3, 2/3), drafter (2/3, 1/3)."""
    target, drafter = fixed([1 / 3, 2 / 3]), TableDrafter(fixed([2 / 3, 1 / 3]))
    assert mean_accepted("speculative", target, drafter, limits(3), 2) == pytest.approx(10 / 9)
    assert mean_accepted("block", target, drafter, limits(3), 2) == pytest.approx(11 / 9)


@given(pairs(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_block_verification_never_accepts_less_than_speculative_sampling(
    pair: tuple[Table, Table, int], depth: int
) -> None:
    target, drafter, vocabulary = pair
    chain = limits(depth + 1, depth)
    block, single = (
        mean_accepted(rule, target, TableDrafter(drafter), chain, vocabulary)
        for rule in ("block", "speculative")
    )
    assert block >= single - ROUNDING


@pytest.mark.slow
@given(pairs(most=4), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_draws_without_replacement_are_accepted_as_often_or_more(
    pair: tuple[Table, Table, int], count: int
) -> None:
    target, drafter, vocabulary = pair
    without, independent = (
        mean_accepted(rule, target, TableDrafter(drafter), limits(count + 1, depth=1), vocabulary)
        for rule in ("recursive", "specinfer")
    )
    assert without >= independent - ROUNDING


def test_merged_draws_can_make_up_for_replacement() -> None:
    """SpecInfer's equal draws pool what the tree has below them where the drafter is nearly sure."""
    target = table(lambda text: [0.99, 0.01, 0, 0] if len(text) == 2 else [0.5, 0.5, 0, 0])
    drafter = table(lambda text: [0.99, 0.01, 0, 0] if len(text) == 2 else [0.25] * 4)
    recursive, specinfer = (
        mean_accepted(rule, target, TableDrafter(drafter), limits(6), 4)
        for rule in ("recursive", "specinfer")
    )
    assert recursive == pytest.approx(1 + 1 / 2 + 1 / 2 * 2 / 3)
    assert specinfer > 1.86 > recursive


@given(pairs(), st.lists(st.integers(0, 1), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_picked_chain_is_accepted_as_often_as_the_target_chooses_it(
    pair: tuple[Table, Table, int], guess: list[int]
) -> None:
    target, _, vocabulary = pair
    expected, chance = 0.0, 1.0
    text: tuple[int, ...] = (1, 0)
    for token in guess:
        chance *= float(np.exp(target(text)[token]))
        expected += chance
        text = (*text, token)
    drafter = PickingDrafter([guess])
    mean = mean_accepted("speculative", target, drafter, limits(len(guess) + 1, 3), vocabulary)
    assert mean == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rule", ["speculative", "block", "specinfer", "spectr", "recursive"])
def test_a_drafter_that_is_the_target_is_always_right(rule: str) -> None:
    """So the same penalties, filters and temperature apply to both."""
    both = fixed([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
    config = replace(FILTERED, verify=rule)
    drafter = TableDrafter(both)
    method = method_for(config, 4, 3, drafter)
    assert one_pass(method, drafter, both, limits(10, depth=3))[1] == 3


def test_equal_draws_are_one_node_that_continues_with_all_of_them() -> None:
    drafter = TableDrafter(fixed([0.0, 1.0]))
    config = GenerationConfig(temperature=1, verify="spectr")
    guess = method_for(config, 2, 1, drafter).drafting.draft(drafter, [1, 0], limits(10, depth=3))
    assert guess.tree.tokens.tolist() == [0, 1, 1, 1]
    assert guess.drawn == {0: [1, 1, 1], 1: [1, 1, 1], 2: [1, 1, 1]}


def test_draws_without_replacement_end_with_the_law() -> None:
    drafter = TableDrafter(fixed([0.5, 0.0, 0.5]))
    config = GenerationConfig(temperature=1, verify="recursive")
    guess = method_for(config, 3, 1, drafter).drafting.draft(drafter, [1, 0], limits(4, depth=1))
    assert sorted(guess.drawn[0]) == [0, 2]


def test_the_first_draw_continues_for_those_that_the_law_has_no_token_for() -> None:
    sure = table(lambda text: [0, 1, 0] if len(text) == 2 else [0.2, 0.3, 0.5])
    drafter = TableDrafter(sure)
    config = GenerationConfig(temperature=1, verify="recursive")
    guess = method_for(config, 3, 1, drafter).drafting.draft(drafter, [1, 0], limits(6))
    assert [len(guess.drawn[node]) for node in (0, 1)] == [1, 3]


def test_shapes_keep_their_limits() -> None:
    for budget in range(1, 40):
        for depth in range(5):
            for leaves in (1, 3, 64):
                most = TreeLimits(budget=budget, depth=depth, leaves=leaves, branching=8 if leaves > 1 else 1)
                for shape in (chain(most), sequences(most), by_rank(most)):
                    assert len(shape.below) <= budget
                    assert sum(not below for below in shape.below) <= leaves
                    depths = [0] * len(shape.below)
                    for node, below in enumerate(shape.below):
                        for child in below:
                            depths[child] = depths[node] + 1
                    assert max(depths) <= depth


def test_what_is_left_of_two_equal_laws_is_the_law() -> None:
    law = np.array([0.25, 0.75])
    assert excess(law, law) is law
    assert excess(law, np.array([0.5, 0.5])).tolist() == [0.0, 0.25]
