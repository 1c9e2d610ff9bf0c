"""The arithmetic of benchmarks: spreads, curves, shares of limits, and answers held against each other."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.bench.rows.figures import (
    Row,
    at,
    broken_promises,
    fill_identical,
    fill_shares,
    knee,
    spread,
)


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.5]) == {
        "tokens_per_second": 2.5,
        "tokens_per_second_min": 1.0,
        "tokens_per_second_max": 3.0,
    }
    assert spread([]) == {}


def test_a_curve_between_and_beyond_its_points() -> None:
    curve = {1: 1.0, 2: 1.0, 4: 3.0}
    assert [at(curve, rows) for rows in (1, 1.5, 3, 4, 6)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert at({8: 2.0}, 3) == 2.0


def test_the_knee_is_where_rows_begin_to_cost() -> None:
    assert knee({1: 1.0, 2: 1.1, 8: 1.25, 16: 1.3}) == 8
    assert knee({1: 1.0, 2: 2.0}) == 1


def test_shares_of_the_limits() -> None:
    row = Row("a", "stream", 16, round_s=2.0, pass_s=1.6, streamed_bytes_per_pass=10**9, rows={8: 3, 16: 1})
    memory = Row("b", "memory", "none", round_s=1.0, pass_s=1.0, streamed_bytes_per_pass=0, rows={8: 1})
    mapped = Row("c", "mmap", "none", round_s=1.0, pass_s=1.0, rows={8: 1})
    fill_shares([row, memory, mapped], 10**9, {8: 0.8, 16: 1.6})
    assert row.disk_share == pytest.approx(0.5)
    assert row.compute_share == pytest.approx((3 * 0.8 + 1.6) / 4 / 1.6)
    assert (memory.disk_share, memory.compute_share) == (None, pytest.approx(0.8))
    assert (mapped.disk_share, mapped.compute_share) == (None, None)
    unknown = Row("d", "stream", 16, round_s=2.0, pass_s=1.6, streamed_bytes_per_pass=10**9, rows={8: 3})
    fill_shares([unknown], None, {})
    assert (unknown.disk_share, unknown.compute_share) == (None, None)


def answered(answers: list[list[int]], **values: Any) -> Row:
    return Row("row", "stream", 16, answers=answers, **values)


def test_answers_are_held_against_the_first_exact_row() -> None:
    plain = answered([[1, 9], [3]], exact=True, kernels="plain")
    near = answered([[1, 9], [3]], exact=False)
    first = answered([[1, 2], [3]], exact=True, kernels="packed")
    cut = answered([[1]], exact=True, kernels="packed")
    wrong = answered([[1, 2], [4]], exact=True, kernels="packed")
    lossy = answered([[7, 2], [4]], exact=True, lossy=True)
    failed = Row("row", "stream", 16, error="no")
    rows = [plain, near, first, cut, wrong, lossy, failed]
    fill_identical(rows)
    assert [row.identical for row in rows] == [False, False, True, True, False, False, None]
    assert broken_promises(rows) == [wrong]


def test_without_exact_rows_the_first_one_counts() -> None:
    rows = [answered([[1]], exact=False), answered([[1, 2]], exact=False), answered([[2]], exact=False)]
    fill_identical(rows)
    assert [row.identical for row in rows] == [True, True, False]
    assert broken_promises(rows) == []
