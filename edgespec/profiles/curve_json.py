"""Time curves as JSON."""

from __future__ import annotations

from typing import Any

from edgespec.costs.curves import Curve


def curve_to_json(curve: Curve) -> list[list[float]]:
    """[rows, seconds] points."""
    return [[row, round(s, 7)] for row, s in zip(curve.rows, curve.seconds, strict=True)]


def curve_from_json(points: Any) -> Curve:
    """The curve through [rows, seconds] points."""
    return Curve.through((int(row), float(seconds)) for row, seconds in points)
