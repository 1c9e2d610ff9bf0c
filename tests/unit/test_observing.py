"""Passes that a drafter is shown, and that one that rests is not asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.observation import ObservationPolicy
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.drafters.base import NoDrafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import method_for
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sizing.sizers import FixedSizer
from edgespec.speculation.tree import FloatArray, TokenTree
from tests.passes import passes
from tests.unit.fakes import N_VOCAB, fake_engine

PASS_S = 0.01


class Looking(NoDrafter):
    """Takes its time for each look at a pass."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.look_s = look_s
        self.now = 0.0
        self.looks = self.asked = 0

    def clock(self) -> float:
        return self.now

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        self.asked += 1
        return super().draft(text, limits, ranking)

    def observe(self, text: Sequence[int], tree: TokenTree, logits: FloatArray) -> None:
        self.looks += 1
        self.now += self.look_s


class LookingAtTarget(Looking):
    reads_target = True


def shown(drafter: Looking, passes: int, resting_pass_s: float | None, observing: ObservationPolicy) -> None:
    for _ in range(passes):
        tree, logits = TokenTree.root_only(1), np.zeros((1, N_VOCAB), dtype=np.float32)
        observing.show(drafter, [1], tree, logits, resting_pass_s)


def test_a_drafter_that_drafts_is_shown_every_pass() -> None:
    drafter = Looking(look_s=1.0)
    shown(drafter, 20, None, ObservationPolicy(drafter.clock))
    assert drafter.looks == 20


def test_a_cheap_look_is_taken_in_every_pass_while_the_drafter_rests() -> None:
    drafter = Looking(look_s=PASS_S / 1000)
    shown(drafter, 50, PASS_S, ObservationPolicy(drafter.clock))
    assert drafter.looks == 50


@pytest.mark.parametrize("forced", [True, False])
def test_looks_are_forced(forced: bool) -> None:
    drafter = Looking(look_s=1.0)  # far too long to be worth it
    observing = ObservationPolicy(drafter.clock)
    observing.forced = forced
    shown(drafter, 20, PASS_S, observing)
    assert drafter.looks == (20 if forced else 0)
    shown(drafter, 5, None, observing)
    assert drafter.looks == (25 if forced else 5), "a drafter that drafts is shown its passes in any case"


@given(st.floats(PASS_S / 5000, 100 * PASS_S), st.integers(50, 1000))
def test_looks_of_a_resting_drafter_hardly_take_time(look_s: float, passes: int) -> None:
    drafter = Looking(look_s)
    shown(drafter, passes, PASS_S, ObservationPolicy(drafter.clock))
    counted_s = min(look_s, PASS_S)  # a single one counts as a pass at most
    allowed = 0.002 * passes * PASS_S / counted_s
    assert min(allowed - 1, passes) <= drafter.looks <= allowed + 1


def test_a_look_that_was_disturbed_is_not_the_last() -> None:
    drafter = Looking(look_s=1000 * PASS_S)
    observing = ObservationPolicy(drafter.clock)
    shown(drafter, 1, PASS_S, observing)
    drafter.look_s = 0.0
    shown(drafter, 1000, PASS_S, observing)
    assert drafter.looks > 50


@pytest.mark.parametrize("drafter", [Looking(), LookingAtTarget()])
def test_only_drafters_that_follow_the_target_are_asked_for_trees_of_a_root(drafter: Looking) -> None:
    engine, _ = fake_engine(drafter, 0, never_ends=True)
    method = method_for(GenerationConfig(temperature=0.0), N_VOCAB, 0, drafter)
    sizer = FixedSizer(TreeLimits(budget=1, depth=8, leaves=4))
    assert len(list(passes(engine, [3, 1, 2], method, 6, sizer))) == 6
    assert drafter.asked == (6 if drafter.reads_target else 0)
