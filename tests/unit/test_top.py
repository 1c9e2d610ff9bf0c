"""The largest entries of long rows, against a plain sort."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.speculation.top import log_sums, top
from edgespec.speculation.tree import FloatArray


def sorted_top(values: FloatArray, count: int) -> tuple[FloatArray, np.ndarray]:
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(values, order, axis=1), order


@pytest.mark.parametrize("n", [1, 63, 128, 5000, 49_152, 49_999])
@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_the_largest_entries_come_first(n: int, count: int) -> None:
    values = np.random.default_rng(n).normal(scale=3, size=(3, n)).astype(np.float32)
    found, indices = top(values, count)
    expected, order = sorted_top(values, count)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(indices, order)
    assert indices.dtype == np.int32
    assert found.dtype == np.float32


@given(
    st.integers(1, 16),
    st.integers(1, 6),
    st.integers(1, 5000),
    st.integers(1, 4000),
    st.integers(0, 2**32 - 1),
)
def test_equal_entries_never_change_the_order(
    count: int, rows: int, n: int, different: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, different, (rows, n)).astype(np.float32)
    values[rng.random(rows) < 0.2] = -np.inf
    found, indices = top(values, count)
    expected, order = sorted_top(values, count)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(indices, order)


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("n_vocab", [49_152, 49_999])
def test_no_copy_of_the_rows_is_made(count: int, n_vocab: int) -> None:
    logits = np.random.default_rng(0).normal(size=(16, 50_000)).astype(np.float32)[:, :n_vocab]
    tracemalloc.start()
    try:
        top(logits, count)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < logits.size * logits.itemsize / 4


def test_rows_may_be_part_of_longer_ones() -> None:
    whole = np.random.default_rng(2).normal(size=(5, 3000)).astype(np.float32)
    np.testing.assert_array_equal(top(whole[:, :2900], 8)[1], sorted_top(whole[:, :2900], 8)[1])


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
    values = np.full((3, 20_000), np.nan, dtype=np.float32)
    values[1] = np.arange(20_000)
    values[2, 5] = 1
    found = top(values, 8)[1]
    assert [len(set(row)) for row in found.tolist()] == [8, 8, 8]
    assert found[1].tolist() == list(range(19_999, 19_991, -1))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_sums_are_those_of_double_precision(temperature: float) -> None:
    values = np.random.default_rng(1).normal(scale=5, size=(4, 30_000)).astype(np.float32)
    best = values.max(axis=1, keepdims=True)
    exact = np.log(np.exp((values.astype(np.float64) - best) / temperature).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_sums(values, best, temperature), exact, rtol=1e-4, atol=1e-4)
