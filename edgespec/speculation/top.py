"""Top-k and log-sum-exp over rows of vocabulary size.

Written in NumPy on purpose: it is as fast as PyTorch here, and importing PyTorch would take more than a
second, and more than 100 MiB of every memory budget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.tree import FloatArray, IntArray

_GROUP = 64  # entries per group; the maxima of groups are compared first
_FEW = 16  # entries whose groups are gathered; for more, reading the whole row again is faster


def top(values: FloatArray, count: int) -> tuple[FloatArray, IntArray]:
    """The largest entries of each row, largest first; of equal entries the lowest index comes first.

    Args:
        values: (rows, n).

    Returns:
        (rows, min(count, n)) values, and their indices.
    """
    count = min(count, values.shape[1])
    indices = np.empty((len(values), count), dtype=np.int32)
    found = np.zeros(len(values), dtype=np.bool_)
    if count <= _FEW and len(values) > 1 and values.shape[1] >= 2 * count * _GROUP:
        found = _top_in_groups(values, indices)
    for row in np.flatnonzero(~found).tolist():
        indices[row] = _top_of_row(values[row], count)
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


def _top_in_groups(values: FloatArray, indices: IntArray) -> NDArray[np.bool_]:
    """Find the largest entries of many rows at once, from as many groups of each.

    Args:
        values: (rows, n).
        indices: (rows, count) set for the rows that were found.

    Returns:
        (rows,) whether they were found. Where maxima of groups are equal or not numbers, only a look at the
        whole row tells which entries come first.
    """
    n, count = values.shape[1], indices.shape[1]
    groups = n // _GROUP  # group g has the entries g, g + groups, g + 2 * groups, ...
    maxima = values[:, : groups * _GROUP].reshape(len(values), _GROUP, groups).max(axis=1)
    least = np.partition(maxima, groups - count, axis=1)[:, groups - count, None]
    large = maxima >= least
    found: NDArray[np.bool_] = large.sum(axis=1) == count
    if not found.all():
        values, large, least = values[found], large[found], least[found]
    rows = np.arange(len(values))
    chosen = np.nonzero(large)[1].reshape(-1, 1, count)
    members = (np.arange(_GROUP)[:, None] * groups + chosen).reshape(len(values), _GROUP * count)
    rest = np.broadcast_to(np.arange(groups * _GROUP, n), (len(values), n % _GROUP))  # in no group
    members = np.concatenate([members, rest], axis=1)
    held = np.take_along_axis(values, members, axis=1)
    # At least `count` entries of each row are as large as `least`. They are in order, and the sort is stable.
    held_rows, places = np.nonzero(held >= least)
    order = np.lexsort((-held[held_rows, places], held_rows))
    best = order[np.searchsorted(held_rows, rows)[:, None] + np.arange(count)]
    indices[found] = members[rows[:, None], places[best]]
    return found


def _top_of_row(row: FloatArray, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest entries."""
    groups = len(row) // _GROUP
    if groups < 2 * count:
        return np.argsort(-row, kind="stable")[:count]
    # `count` groups have a maximum of at least `least`, so at least `count` entries are that large.
    body = row[: groups * _GROUP].reshape(_GROUP, groups)
    maxima = body.max(axis=0)
    least = np.partition(maxima, groups - count)[groups - count]
    large = np.flatnonzero(~(maxima < least))  # not numbers are looked at, too
    if len(large) <= 2 * count:
        members, which = np.nonzero(body[:, large] >= least)
        rest = np.flatnonzero(row[groups * _GROUP :] >= least) + groups * _GROUP
        found = np.concatenate([members * groups + large[which], rest])
    else:  # equal maxima: with most of the row -inf, all of it would be sorted
        found = np.flatnonzero(row > least)
        if len(found) < count:
            found = np.concatenate([found, np.flatnonzero(row == least)[: count - len(found)]])
    if len(found) < count:  # there are NaNs, which compare false with everything
        return np.argsort(-row, kind="stable")[:count]
    return found[np.argsort(-row[found], kind="stable")[:count]]
