"""The largest entries of long rows, against a plain sort."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.speculation.top import log_sums, top
from edgespec.speculation.tree import FloatArray


def sorted_top(values: FloatArray, count: int) -> tuple[FloatArray, np.ndarray]:
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(values, order, axis=1), order


@pytest.mark.parametrize("n", [1, 63, 128, 5000, 49_152, 49_999])
@pytest.mark.parametrize("count", [1, 64, 256])
def test_the_largest_entries_come_first(n: int, count: int) -> None:
    values = np.random.default_rng(n).normal(scale=3, size=(3, n)).astype(np.float32)
    found, indices = top(values, count)
    expected, order = sorted_top(values, count)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(indices, order)
    assert indices.dtype == np.int32
    assert found.dtype == np.float32


@pytest.mark.parametrize("finite", [0, 1, 3, 200])
def test_equal_entries_come_in_their_order(finite: int) -> None:
    # As a grammar leaves them: nearly everything is ruled out.
    values = np.full((2, 20_000), -np.inf, dtype=np.float32)
    rng = np.random.default_rng(0)
    for row in values:
        row[rng.choice(len(row), finite, replace=False)] = rng.integers(0, 5, finite)
    found, indices = top(values, 64)
    expected, order = sorted_top(values, 64)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(indices, order)


def test_rows_that_are_not_numbers_still_give_entries() -> None:
    values = np.full((1, 20_000), np.nan, dtype=np.float32)
    assert len(set(top(values, 8)[1][0].tolist())) == 8


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_sums_are_those_of_double_precision(temperature: float) -> None:
    values = np.random.default_rng(1).normal(scale=5, size=(4, 30_000)).astype(np.float32)
    best = values.max(axis=1, keepdims=True)
    exact = np.log(np.exp((values.astype(np.float64) - best) / temperature).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_sums(values, best, temperature), exact, rtol=1e-4, atol=1e-4)
