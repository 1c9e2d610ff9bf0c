"""Curves of seconds by rows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.curves import Curve

_POINTS = st.dictionaries(st.integers(1, 512), st.floats(0.001, 100), min_size=1, max_size=8)
_CURVES = _POINTS.map(lambda points: Curve.through(points.items()))
_ROWS = st.integers(1, 1024)


def test_between_points_it_is_a_straight_line_and_continues_beyond_the_last() -> None:
    curve = Curve.through([(32, 2.0), (1, 1.0), (16, 1.0)])
    assert [curve.at(n) for n in (1, 8, 16, 24, 32, 48)] == [1.0, 1.0, 1.0, 1.5, 2.0, 3.0]
    assert curve.slope(1) == 0
    assert curve.slope(20) == curve.slope(500) == 1 / 16


def test_the_knee_is_where_rows_begin_to_cost() -> None:
    assert Curve.through([(1, 1.0), (16, 1.0), (32, 2.0)]).knee(0.05) == 16
    assert Curve.through([(1, 1.0), (16, 1.0), (32, 2.0)]).knee(0.25) == 20
    assert Curve.through([(1, 1.0), (64, 1.0)]).knee() == 64
    assert Curve.through([(1, 1.0), (2, 2.0)]).knee() == 1


@given(_POINTS, _ROWS)
def test_more_rows_never_take_less(points: dict[int, float], rows: int) -> None:
    curve = Curve.through(points.items())
    assert curve.at(rows) <= curve.at(rows + 1) + 1e-9
    assert curve.slope(rows) >= 0
    assert 1 <= curve.knee() <= max(points)
    assert curve.at(curve.knee()) <= 1.05 * curve.at(1) + 1e-9 or curve.knee() == min(points)


@given(_CURVES, st.floats(0.0, 100), _ROWS)
def test_a_floor_holds_everywhere_and_changes_nothing_above_it(curve: Curve, floor: float, rows: int) -> None:
    wanted = max(floor, curve.at(rows))
    off = curve.floored(floor).at(rows) - wanted
    # The corner is at a whole row.
    assert -1e-6 * (1 + wanted) <= off <= curve.slope(rows) + 1e-6 * (1 + wanted)


@given(_CURVES, _ROWS, st.floats(0.001, 100))
def test_observing_a_point_again_and_again_brings_the_curve_there(
    curve: Curve, rows: int, seconds: float
) -> None:
    for _ in range(400):
        curve = curve.moved(rows, seconds, 0.2)
    assert (
        curve.at(min(rows, curve.rows[-1])) == pytest.approx(curve.at(rows), rel=1) or rows > curve.rows[-1]
    )
    if curve.rows[0] <= rows <= curve.rows[-1]:
        # Where the point lies below its left neighbours they come down with it, as curves never fall.
        assert curve.at(rows) == pytest.approx(seconds, rel=0.05) or curve.at(rows) > seconds


@given(_CURVES, _ROWS, st.floats(1.0, 3.0))
def test_what_is_observed_beyond_the_measured_sizes_leaves_them_alone(
    curve: Curve, rows: int, factor: float
) -> None:
    reaching = curve.reaching(rows)
    assert [reaching.at(n) for n in curve.rows] == pytest.approx(list(curve.seconds))
    assert reaching.at(rows) == pytest.approx(curve.at(rows))
    if rows > curve.rows[-1]:
        seconds = factor * curve.at(rows)
        for _ in range(50):
            reaching = reaching.moved(rows, seconds, 0.2)
        assert [reaching.at(n) for n in curve.rows] == pytest.approx(list(curve.seconds))
        assert reaching.at(rows) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, math.nan)], [(1, -1.0)]])
def test_what_is_no_curve_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="points"):
        Curve.through(points)
