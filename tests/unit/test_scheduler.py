"""Scheduling: rows of a pass, and the number of texts that the cells take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.pass_plan import CellBudget, PassLimits, PrefillLimiter, plan_pass

limits = st.builds(PassLimits, sequences=st.integers(1, 60), rows=st.integers(1, 128))


@given(st.integers(0, 80), st.lists(st.integers(1, 500), max_size=20), limits)
def test_rows_are_filled_and_never_exceeded(extendable: int, unread: list[int], limits: PassLimits) -> None:
    limits = PassLimits(min(limits.sequences, limits.rows), limits.rows)
    plan = plan_pass(extendable, unread, limits)
    assert plan.extended == min(extendable, limits.sequences), "answers come first"
    assert len(plan.chunks) == len(unread)
    assert all(0 <= chunk <= tokens for chunk, tokens in zip(plan.chunks, unread, strict=True))
    assert plan.rows <= limits.rows
    if sum(unread) >= limits.rows - plan.extended:
        assert plan.rows == limits.rows, "no row is left empty while prompts wait"


@given(st.integers(0, 30), st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_the_oldest_prompt_always_gets_on(extendable: int, unread: list[int]) -> None:
    plan = plan_pass(extendable, unread, PassLimits(sequences=30, rows=60))
    assert plan.chunks[0] >= min(unread[0], (60 - plan.extended) // 2)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert plan_pass(10, [5000, 12], PassLimits(60, 60)).chunks == (38, 12)
    assert plan_pass(10, [5000, 400, 12], PassLimits(60, 60)).chunks == (25, 13, 12)


def test_without_prompts_every_text_is_extended() -> None:
    plan = plan_pass(7, [], PassLimits(60, 60))
    assert (plan.extended, plan.chunks, plan.rows) == (7, (), 7)


def test_cells_are_kept_free_for_texts_to_grow() -> None:
    cells = CellBudget(cells=1000, spare=100, growth=50)
    assert cells.admits(held=0, wanted=5000, left=[900]), "the first text always begins"
    assert cells.admits(held=500, wanted=200, left=[50, 60, 70, 80])
    assert not cells.admits(held=500, wanted=201, left=[50, 60, 70, 80])
    assert cells.admits(held=500, wanted=201, left=[50, 60, 70, 49]), "one of them will have ended"
    assert cells.admits(held=500, wanted=400, left=[0, 0, 0, 0])
    assert cells.overflows(901)
    assert not cells.overflows(900)


@given(free=st.integers(60, 3000), row_s=st.floats(1e-4, 0.1))
def test_answers_wait_no_more_than_twice_as_long_for_prompts(free: int, row_s: float) -> None:
    """Passes take as long for `free` rows as for one, and time by their rows beyond."""
    beside = PrefillLimiter(60)
    assert beside.rows == 60, "nothing is known yet"

    def seconds(rows: int) -> float:
        return row_s * max(rows, free)

    for _ in range(40):
        beside.passed(beside.rows, seconds(beside.rows))
    assert beside.rows == pytest.approx(2 * free, rel=0.02)
    beside.passed(30, seconds(30))
    assert beside.rows == pytest.approx(2 * free, rel=0.02), "a pass that was not full says nothing of others"


def test_a_slow_processor_reads_prompts_in_the_least_pieces() -> None:
    beside = PrefillLimiter(60)
    for _ in range(10):
        beside.passed(1, 0.1)
        beside.passed(beside.rows, 0.1 + 0.1 * beside.rows)
    assert beside.rows == 60
