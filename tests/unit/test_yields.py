"""A run with large trees shows the yields of smaller ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.yields import BUDGETS, TreeYields, expected_yields
from edgespec.speculation.sizing.yield_meter import YieldMeter
from edgespec.speculation.tree import TokenTree
from tests.unit.strategies import distinct_trees


@given(distinct_trees(max_nodes=80), st.integers(0, 2**32 - 1))
def test_a_smaller_budget_would_have_accepted_what_of_the_path_its_own_tree_holds(
    tree: TokenTree, seed: int
) -> None:
    node = int(np.random.default_rng(seed).integers(len(tree)))
    path = tree.path(node)
    meter = YieldMeter()
    meter.add(tree, path, bonus=0, steps=3, rows=5)
    yields = meter.yields()
    assert yields is not None
    for budget, tokens in yields.tokens.items():
        small = tree.trimmed(budget)
        here, held = 0, 1
        for step in path[1:]:
            child = small.child(here, int(tree.tokens[step]))
            if child is None:
                break
            here, held = child, held + 1
        assert tokens == held
    assert yields.at(len(tree)) <= len(path)
    assert (yields.steps_at(len(tree)), yields.rows_at(len(tree))) == (3, 5) or len(tree) == 1


def test_ranks_and_depths_are_counted_along_the_path() -> None:
    # The target chooses the root's second candidate, then its first, and then a token that is no candidate.
    tree = TokenTree.build([0, 1, 2, 3, 4, 5], [-1, 0, 0, 2, 2, 3], [0, -0.1, -0.5, -0.6, -0.9, -0.7])
    meter = YieldMeter()
    meter.add(tree, [0, 2, 3], bonus=9, steps=2, rows=6)
    yields = meter.yields()
    assert yields is not None
    assert yields.by_rank[:3] == pytest.approx((1 / 3, 1 / 3, 0))
    assert yields.by_depth == (1, 1, 0)


def test_before_the_first_pass_nothing_is_known() -> None:
    assert YieldMeter().yields() is None


@given(st.floats(0.05, 0.95))
def test_a_better_drafter_yields_more_and_larger_trees_never_less(agreement: float) -> None:
    worse, better = expected_yields(agreement), expected_yields(min(agreement + 0.04, 0.99))
    assert list(worse.tokens.values()) == sorted(worse.tokens.values())
    assert worse.at(1) == 1
    assert all(better.at(b) >= worse.at(b) - 1e-9 for b in BUDGETS)


def test_yields_survive_a_file_and_can_be_mixed() -> None:
    yields, other = expected_yields(0.7), expected_yields(0.3)
    assert TreeYields.from_json(yields.to_json()).at(16) == pytest.approx(yields.at(16), abs=1e-3)
    assert yields.interpolated(other, 0).at(16) == yields.at(16)
    assert yields.interpolated(other, 1).at(16) == pytest.approx(other.at(16))
    assert yields.interpolated(other, 0.5).at(16) == pytest.approx((yields.at(16) + other.at(16)) / 2)


def test_yields_follow_what_is_seen_later_the_more_the_longer_it_was() -> None:
    def all_times(ratio: float) -> dict[int, float]:
        return dict.fromkeys(BUDGETS, ratio)

    yields = replace(expected_yields(0.7), passes=30)
    assert yields.corrected(all_times(1.0), 50).tokens == pytest.approx(yields.tokens)
    drafted = yields.at(16) - 1
    assert yields.corrected(all_times(1.5), 30).at(16) - 1 == pytest.approx(1.25 * drafted)
    assert yields.corrected(all_times(1.5), 10**6).at(16) - 1 == pytest.approx(1.5 * drafted, rel=1e-3)
    assert yields.corrected(all_times(1.0), 30).steps_at(16) == yields.steps_at(16)
    assert yields.corrected(all_times(1.0), 30, steps=0.5).steps_at(16) == pytest.approx(
        0.75 * yields.steps_at(16)
    )
    # However long the past was, what is seen now still counts.
    long = yields.corrected(all_times(1.0), 10**6)
    assert long.corrected(all_times(2.0), 400).at(16) - 1 == pytest.approx(1.5 * drafted)


@given(st.lists(st.floats(0, 3), min_size=len(BUDGETS), max_size=len(BUDGETS)), st.integers(1, 500))
def test_corrected_yields_never_fall_with_the_budget(ratios: list[float], passes: int) -> None:
    yields = replace(expected_yields(0.6), passes=50)
    moved = list(yields.corrected(dict(zip(BUDGETS, ratios, strict=True)), passes).tokens.values())
    assert moved == sorted(moved)
    assert moved[0] == 1


@pytest.mark.parametrize("record", [{}, {"passes": 1, "tokens": {"a": 1}, "steps": {}, "by_rank": []}])
def test_what_is_no_record_of_yields_is_refused(record: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        TreeYields.from_json(record)


def test_yields_reach_larger_trees_by_the_logarithm() -> None:
    """As they do where acceptance is known: each doubling of a large tree adds about the same."""
    known = expected_yields(0.7)
    measured = replace(known, tokens={b: t for b, t in known.tokens.items() if b <= 128})
    further = measured.reaching(256)
    assert further.at(256) == pytest.approx(known.at(256), rel=0.03)
    assert further.at(64) == measured.at(64)
    assert further.rows_at(256) == pytest.approx(2 * further.rows_at(128), rel=0.01)
    assert measured.reaching(96) == measured
