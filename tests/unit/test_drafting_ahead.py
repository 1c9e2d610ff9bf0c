"""Drafting ahead: which waits of a pass are used, and that the text does not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.drafting_ahead import DraftingAhead
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.generation.result import PassRecord
from edgespec.speculation.drafters.base import NoDrafter
from tests.unit.fakes import FakeDrafter, fake_engine


class Clock:
    """A clock that goes on when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stepping(FakeDrafter):
    """Has a number of steps to take ahead, each of which takes the same time."""

    def __init__(self, clock: Clock, step_s: float, steps: int = 1000) -> None:
        super().__init__(0, 1.0)
        self.left = steps
        self.taken = 0
        self._clock, self._step_s = clock, step_s

    def draft_ahead(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.taken += 1
        self._clock.now += self._step_s
        return True


def record(wait_s: float, step_s: float = 0.01) -> PassRecord:
    return PassRecord(8, 2, draft_s=4 * step_s, verify_s=1.0, accept_s=0.0, wait_s=wait_s, draft_steps=4)


def ready(drafter: Stepping, clock: Clock, wait_s: float) -> Callable[[float, float], bool]:
    """What a pass may do, after one that has waited so long."""
    ahead = DraftingAhead(clock)
    ahead.end(record(wait_s))
    use = ahead.begin(drafter)
    assert use is not None
    return use


def test_nothing_is_done_before_anything_was_measured() -> None:
    ahead = DraftingAhead()
    assert ahead.begin(NoDrafter()) is None
    ahead.end(PassRecord(1, 0, 0.0, 1.0, 0.0, wait_s=0.5))  # no draft step yet
    assert ahead.begin(NoDrafter()) is None


@pytest.mark.parametrize(
    ("wait_s", "read_ahead_s", "left", "works"),
    [
        (0.5, 0.1, 0.9, True),
        (0.0, 0.1, 0.9, False),  # bound by arithmetic
        (0.5, 0.005, 0.9, False),  # the disk would stand still
        (0.5, 0.1, 0.01, False),  # nothing left in which the pass could catch up
    ],
)
def test_steps_are_taken_where_there_is_time(
    wait_s: float, read_ahead_s: float, left: float, works: bool
) -> None:
    clock = Clock()
    assert ready(Stepping(clock, 0.01), clock, wait_s)(read_ahead_s, left) == works


@given(st.floats(0, 2), st.floats(0.001, 0.3))
def test_steps_take_no_more_than_passes_have_waited(wait_s: float, step_s: float) -> None:
    clock = Clock()
    drafter = Stepping(clock, step_s)
    ahead = DraftingAhead(clock)
    ahead.end(record(wait_s, step_s))
    use = ahead.begin(drafter)
    assert use is not None
    for layer in range(30):
        while use(1.0, 1 - layer / 30):
            pass
    assert ahead.seconds <= wait_s + 1e-6
    assert ahead.steps == drafter.taken


def test_steps_that_leave_no_waits_become_fewer() -> None:
    """As if passes had become faster: what was thought to be a wait is not."""
    clock = Clock()
    drafter = Stepping(clock, 0.01)
    ahead = DraftingAhead(clock)
    ahead.end(record(0.5))
    taken = []
    for _ in range(40):
        use = ahead.begin(drafter)
        assert use is not None
        while use(1.0, 1.0):
            pass
        taken.append(ahead.steps)
        ahead.end(record(0.0))
    assert taken[0] > 40
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < taken[0] / 2


def test_a_drafter_that_has_nothing_to_do_is_not_counted() -> None:
    clock = Clock()
    use = ready(Stepping(clock, 0.01, steps=2), clock, 1.0)
    assert [use(1.0, 1.0) for _ in range(4)] == [True, True, False, False]


def test_it_can_be_switched_off() -> None:
    clock = Clock()
    ahead = DraftingAhead(clock)
    ahead.end(record(1.0))
    ahead.forced = False
    assert ahead.begin(Stepping(clock, 0.01)) is None


@pytest.mark.parametrize(("waits", "forced"), [(0, None), (3, None), (3, False), (0, True), (3, True)])
def test_an_engine_that_may_drafts_ahead_while_its_target_waits(waits: int, forced: bool | None) -> None:
    clock = Clock()
    drafter = Stepping(clock, 0.0, steps=10_000)
    drafter.steps = 1
    plain, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    expected = plain.generate([1, 2, 3], GenerationConfig(max_tokens=40)).tokens
    engine, target = fake_engine(drafter, 5, tree_budget=6, never_ends=True)
    assert engine.decisions.drafting_ahead is False, "no gain was measured"
    engine.decisions = Decisions(drafting_ahead=forced)
    target.waits = waits
    drafter.left = 200
    answer = engine.generate([1, 2, 3], GenerationConfig(max_tokens=40))
    assert answer.tokens == expected
    assert drafter.taken == (200 if waits and forced is not False else 0)


def test_what_is_read_while_the_drafter_works_is_noted() -> None:
    drafter = FakeDrafter(5, 0.5)
    engine, target = fake_engine(drafter, 5, tree_budget=6, never_ends=True)

    def read_ahead() -> None:
        target.read_s += 0.25

    drafter.on_draft = read_ahead
    target.on_pass = read_ahead
    target.waits = 1
    answer = engine.generate([1, 2, 3], GenerationConfig(max_tokens=20))
    drafted = [record for record in answer.passes if record.nodes > 1]
    assert len(drafted) >= len(answer.passes) - 1  # nothing can follow the last token
    assert [record.draft_read_s for record in drafted] == [0.25] * len(drafted)
    assert [record.hidden_draft_s for record in drafted] == [0.25] * len(drafted)
