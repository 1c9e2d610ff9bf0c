"""Top-k and log-sum-exp over rows of vocabulary size.

Written in NumPy on purpose: it is as fast as PyTorch here, and importing PyTorch would take more than a
second, and more than 100 MiB of every memory budget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.tree import FloatArray, IntArray

_GROUP = 64  # entries per group; the maxima of groups are compared first


def top(values: FloatArray, count: int) -> tuple[FloatArray, IntArray]:
    """The largest entries of each row, largest first; of equal entries the lowest index comes first.

    Args:
        values: (rows, n).

    Returns:
        (rows, min(count, n)) values, and their indices.
    """
    count = min(count, values.shape[1])
    indices = np.empty((len(values), count), dtype=np.int32)
    for row, best in zip(values, indices, strict=True):
        best[:] = _top_of_row(row, count)
    return np.take_along_axis(values, indices, axis=1), indices


def log_sums(values: FloatArray, best: FloatArray, temperature: float = 1.0) -> FloatArray:
    """(rows, 1) the log of each row's sum of exp((value - best) / temperature).

    Args:
        values: (rows, n).
        best: (rows, 1) the largest value of each row.
    """
    sums = np.empty((len(values), 1), dtype=np.float32)
    scratch = np.empty(values.shape[1], dtype=np.float32)  # one row at a time stays in the CPU cache
    for row, most, total in zip(values, best, sums, strict=True):
        np.subtract(row, most, out=scratch)
        if temperature != 1:
            with np.errstate(over="ignore"):  # to -inf, whose exponential is 0, as it should be
                np.divide(scratch, np.float32(temperature), out=scratch)
        np.exp(scratch, out=scratch)
        total[0] = np.log(scratch.sum())
    return sums


def _top_of_row(row: FloatArray, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest entries."""
    groups = len(row) // _GROUP
    if groups < 2 * count:
        return np.argsort(-row, kind="stable")[:count]
    # `count` groups have a maximum of at least `least`, so at least `count` entries are that large.
    maxima = row[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    least = np.partition(maxima, groups - count)[groups - count]
    found = np.flatnonzero(row > least)
    if len(found) < count:
        found = np.concatenate([found, np.flatnonzero(row == least)[: count - len(found)]])
    if len(found) < count:  # there are NaNs, which compare false with everything
        return np.argsort(-row, kind="stable")[:count]
    return found[np.argsort(-row[found], kind="stable")[:count]]
