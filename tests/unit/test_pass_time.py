"""The pass-time model: its functions, and the figures of every prediction that uses it."""

from __future__ import annotations

import pytest

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import (
    RoundCosts,
    draft_seconds,
    even_draft_seconds,
    even_step,
    fitted_overlap,
    pass_seconds,
    read_seconds,
    round_seconds,
)
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import DraftingCosts, TargetPasses, predict
from edgespec.costs.prompts import prompt_seconds
from edgespec.costs.yields import expected_yields
from edgespec.drafting.agreement import Agreement, CostModel
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.sizing.sizers import AdaptiveSizer

COMPUTE = Curve.through([(1, 0.1), (16, 0.2), (64, 1.0)])
STEP = Curve.through([(1, 0.01), (8, 0.02)])
STREAMED = PlannedWeights(
    budget=2_000_000_000,
    needed=4_000_000_000,
    resident_bytes=1_000_000_000,
    streamed_bytes=2_000_000_000,
    slot_bytes=50_000_000,
    n_slots=2,
)


def test_the_shorter_of_reading_and_arithmetic_hides_behind_the_longer() -> None:
    assert pass_seconds(0.8, 0.3) == pass_seconds(0.3, 0.8) == 0.8
    assert pass_seconds(0.8, 0.8, 4.0) == pytest.approx(0.8 * 2**0.25)
    assert pass_seconds(0.8, 0.1, 4.0) == 0.8000488236552882
    assert pass_seconds(0.0, 0.5, 4.0) == 0.5


def test_the_overlap_that_made_the_figures_is_found_again() -> None:
    whole = Curve.through((n, pass_seconds(0.8, COMPUTE.at(n), 3.0)) for n in COMPUTE.rows)
    assert fitted_overlap(COMPUTE, whole, 0.8) == 3.0


def test_what_the_ring_read_ahead_is_not_read_in_the_pass() -> None:
    assert read_seconds(2_000, 1_000.0) == 2.0
    assert read_seconds(2_000, 1_000.0, ring_bytes=500, drafting_s=0.1) == 1.9
    assert read_seconds(2_000, 1_000.0, ring_bytes=500, drafting_s=9.0) == 1.5
    assert read_seconds(0, 1_000.0) == read_seconds(2_000, 0.0) == 0.0


def test_draft_steps_take_as_long_as_their_rows() -> None:
    assert draft_seconds(STEP, steps=4, rows=4) == 0.04
    assert draft_seconds(STEP, steps=4, rows=32) == 0.08
    assert draft_seconds(STEP, steps=4, rows=320, max_rows=8) == 0.08
    assert draft_seconds(STEP, steps=0, rows=0) == 0.0
    step_s, row_s = even_step(STEP, 8)
    assert even_draft_seconds(step_s, row_s, steps=4, rows=18) == pytest.approx(draft_seconds(STEP, 4, 18))
    assert round_seconds(0.04, 0.8, 0.01) == pytest.approx(0.85)


def test_a_streamed_pass_takes_no_less_than_its_reading() -> None:
    curve = RoundCosts(COMPUTE, read_s=0.5).verify
    assert [curve.at(n) for n in (1, 16, 34)] == pytest.approx([0.5, 0.5, 0.5])
    assert curve.at(64) == 1.0
    assert RoundCosts(COMPUTE).verify is COMPUTE


@pytest.mark.parametrize(
    ("nodes", "pass_s", "draft_s", "read_s", "round_s"),
    [
        (1, 0.8000488236552882, 0.0, 0.8, 0.8100488236552882),
        (16, 0.760909577353584, 0.11571428571428571, 0.76, 0.8866238630678698),
        (60, 1.0223533423487063, 0.18857142857142858, 0.76, 1.220924770920135),
    ],
)
def test_plans_predict_known_figures(
    nodes: int, pass_s: float, draft_s: float, read_s: float, round_s: float
) -> None:
    drafting = DraftingCosts("small", expected_yields(0.7), STEP, overhead=1.2, width=4)
    prediction = predict(STREAMED, TargetPasses(COMPUTE, 2.5e9, 0.01, 4.0), drafting, nodes)
    found = (prediction.pass_s, prediction.draft_s, prediction.read_s, prediction.round_s)
    assert found == pytest.approx((pass_s, draft_s, read_s, round_s), rel=1e-12)


def test_prompts_take_known_figures() -> None:
    passes = TargetPasses(COMPUTE, 2.5e9, 0.01, 4.0)
    assert prompt_seconds(STREAMED, passes, 100, 48) == pytest.approx(2.628702374248178, rel=1e-12)


def test_drafters_are_judged_by_known_figures() -> None:
    agreement = Agreement(0.6, 0.9, 100)
    streamed = CostModel(1.0, 1e9, 0.8).tokens_per_second(agreement, 0.02, 3 * 10**8)
    assert streamed == pytest.approx(2.949020266532898, rel=1e-12)
    resident = CostModel(0.5).tokens_per_second(agreement, 0.02, 3 * 10**8)
    assert resident == pytest.approx(5.624294281005859, rel=1e-12)


@pytest.mark.parametrize(
    ("costs", "figures"),
    [
        (None, (64, -4.334859404464596, 1, 0.13103716267491103, 0.0)),
        (
            RoundCosts(COMPUTE, 0.01, 0.002),
            (28, -1.403790204479114, 16, 0.06290843739239069, 0.012581687478478138),
        ),
    ],
)
def test_trees_are_sized_by_known_figures(costs: RoundCosts | None, figures: tuple[float, ...]) -> None:
    sizer = AdaptiveSizer(TreeLimits(budget=64), costs)
    for turn in range(40):
        nodes = min(sizer.limits().budget, 1 + turn % 20)
        drafts = nodes > 1
        sizer.record(
            PassRecord(
                nodes,
                accepted=min(nodes - 1, 3),
                draft_s=0.03 * drafts,
                verify_s=0.1 + 0.001 * nodes,
                accept_s=0.005,
                expected_accepted=min(nodes - 1, 2) * 0.7,
                draft_steps=3 * drafts,
                draft_rows=nodes - 1,
            )
        )
    limits = sizer.limits()
    found = (limits.budget, limits.min_logprob, limits.free_nodes, limits.min_gain, limits.row_gain)
    assert found == pytest.approx(figures, rel=1e-12)
