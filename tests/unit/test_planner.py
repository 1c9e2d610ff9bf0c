"""The planner: its predictions, its choice, and its advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import pass_seconds
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import (
    DraftingCosts,
    TargetPasses,
    alternatives,
    best,
    predict,
)
from edgespec.costs.prompts import best_rows, prompt_seconds
from edgespec.costs.yields import expected_yields

IN_MEMORY = PlannedWeights(budget=8 << 30, needed=4 << 30, resident_bytes=3 << 30)
STREAMED = PlannedWeights(
    budget=2_000_000_000,
    needed=4_000_000_000,
    resident_bytes=1_000_000_000,
    streamed_bytes=2_000_000_000,
    slot_bytes=50_000_000,
    n_slots=2,
)
COMPUTE = Curve.through([(1, 0.1), (16, 0.2), (64, 1.0)])
DRAFTER = DraftingCosts("small", expected_yields(0.7), Curve.through([(1, 0.01), (8, 0.02)]))


def test_plain_decoding_in_memory_takes_its_arithmetic() -> None:
    prediction = predict(IN_MEMORY, TargetPasses(COMPUTE, accept_s=0.01), DraftingCosts("none"), 1)
    assert prediction.tokens_per_second == pytest.approx(1 / 0.11)
    assert (prediction.draft_s, prediction.read_s) == (0, 0)


def test_a_streamed_pass_takes_the_longer_of_reading_and_arithmetic() -> None:
    passes = TargetPasses(COMPUTE, read_rate=2e9)
    small = predict(STREAMED, passes, DraftingCosts("none"), 1)
    assert small.pass_s == pytest.approx(1.0)
    large = predict(STREAMED, replace(passes, read_rate=20e9), DraftingCosts("none"), 64)
    assert large.pass_s == pytest.approx(1.0)


@given(st.floats(1e-4, 100), st.floats(1e-4, 100), st.floats(1.5, 16))
def test_reading_and_arithmetic_take_from_each_other_most_where_they_are_alike(
    read_s: float, compute_s: float, overlap: float
) -> None:
    taken = pass_seconds(read_s, compute_s, overlap)
    assert max(read_s, compute_s) <= taken <= read_s + compute_s
    assert taken == pytest.approx(pass_seconds(compute_s, read_s, overlap))
    alike = max(read_s, compute_s)
    assert taken <= pass_seconds(alike, alike, overlap) == pytest.approx(alike * 2 ** (1 / overlap))


def test_what_is_read_while_the_drafter_works_need_not_be_waited_for() -> None:
    passes = TargetPasses(COMPUTE, read_rate=2e9)
    slow = replace(DRAFTER, step=Curve.through([(1, 1.0)]))
    prediction = predict(STREAMED, passes, slow, 16)
    assert prediction.read_s == pytest.approx((2.0e9 - 2 * 50e6) / 2e9), "no more than the ring holds"
    assert prediction.draft_s > prediction.pass_s


def test_speculation_is_left_off_where_every_node_costs_a_pass() -> None:
    passes = TargetPasses(Curve.through([(1, 1.0), (64, 64.0)]))
    assert best(alternatives(IN_MEMORY, passes, DRAFTER, 64)).nodes == 1


def test_where_passes_cost_the_same_the_tree_is_as_large_as_the_drafter_makes_worth_while() -> None:
    chosen = best(
        alternatives(STREAMED, TargetPasses(Curve.through([(1, 0.1), (64, 0.1)]), 1e9), DRAFTER, 60)
    )
    assert chosen.nodes > 8


def test_trees_are_no_larger_than_allowed() -> None:
    assert max(p.nodes for p in alternatives(IN_MEMORY, TargetPasses(COMPUTE), DRAFTER, 20)) == 16
    assert [p.nodes for p in alternatives(IN_MEMORY, TargetPasses(COMPUTE), DraftingCosts("none"), 64)] == [1]


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(ValueError, match="nothing"):
        best([])


@given(
    seconds=st.lists(st.floats(0.001, 10), min_size=3, max_size=3),
    rate=st.floats(1e8, 1e10),
    agreement=st.floats(0.05, 0.95),
    step=st.floats(0.0001, 1),
)
def test_the_choice_is_the_fastest(seconds: list[float], rate: float, agreement: float, step: float) -> None:
    passes = TargetPasses(Curve.through(zip((1, 16, 64), seconds, strict=True)), rate)
    drafting = DraftingCosts("small", expected_yields(agreement), Curve.through([(1, step)]))
    ways = alternatives(STREAMED, passes, drafting, 60)
    chosen = best(ways)
    assert chosen.tokens_per_second == max(way.tokens_per_second for way in ways)


def test_a_prompt_takes_a_sweep_for_each_piece() -> None:
    passes = TargetPasses(Curve.through([(1, 0.1), (512, 5.21)]), read_rate=1e9)
    short, long = (prompt_seconds(STREAMED, passes, 2048, rows) for rows in (60, 512))
    assert short == pytest.approx(35 * 2.0), "each piece waits for its sweep"
    assert long == pytest.approx(4 * 5.21), "sweeps hide behind arithmetic"


@pytest.mark.parametrize(
    ("rate", "buffers", "rows"),
    [(1e12, 0, 64), (1e9, 0, 512), (1e8, 0, 4096), (1e8, 1_000_000, 512)],
    ids=["arithmetic decides", "a usual disk", "a slow disk", "a slow disk and large buffers"],
)
def test_pieces_are_as_large_as_their_sweeps_cost(rate: float, buffers: int, rows: int) -> None:
    """Passes of 4 ms a row over 2 GB that are streamed, and over what the buffers of pieces displace."""
    passes = TargetPasses(Curve.through([(1, 0.1), (64, 0.1), (4096, 0.1 + 0.004 * 4032)]), read_rate=rate)
    counts = [64 << n for n in range(7)]
    holdings = {n: replace(STREAMED, streamed_bytes=2_000_000_000 + n * buffers) for n in counts}
    assert best_rows(holdings, passes, 32_768) == rows
