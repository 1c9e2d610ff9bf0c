"""How many drafted tokens the lossless rules accept, exactly, and which accept more than which."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tables import PickingDrafter, Table, TableDrafter, fixed, limits, mean_accepted, pairs

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


@given(pairs(most=4), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_draws_without_replacement_are_accepted_as_often_or_more(
    pair: tuple[Table, Table, int], count: int
) -> None:
    target, drafter, vocabulary = pair
    star = limits(count + 1, depth=1)
    without, independent, sequential = (
        mean_accepted(rule, target, TableDrafter(drafter), star, vocabulary)
        for rule in ("recursive", "specinfer", "spectr")
    )
    assert without >= independent - ROUNDING
    assert without >= sequential - ROUNDING


@given(pairs(), st.lists(st.integers(0, 1), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_picked_chain_is_accepted_as_often_as_the_target_chooses_it(
    pair: tuple[Table, Table, int], guess: list[int]
) -> None:
    target, _, vocabulary = pair
    import numpy as np

    expected, chance = 0.0, 1.0
    text: tuple[int, ...] = (1, 0)
    for token in guess:
        chance *= float(np.exp(target(text)[token]))
        expected += chance
        text = (*text, token)
    drafter = PickingDrafter([guess])
    mean = mean_accepted("speculative", target, drafter, limits(len(guess) + 1, 3), vocabulary)
    assert mean == pytest.approx(expected, abs=1e-6)
