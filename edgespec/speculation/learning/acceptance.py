"""Calibrated acceptance: from a candidate's score to the probability that the target chooses it.

`pair.Pair` turns the drafter's logits into probabilities. What is systematically wrong with them is measured
here while decoding: for each class of candidates (by rank, and by how many of the preceding tokens also
preceded an earlier occurrence) the share that the target chose, as a function of the estimated probability.
Within a class a likelier candidate never gets a lower probability (isotonic regression by pooling adjacent
violators, Ayer et al. 1955), and where there are few counts, a prior decides.

Only candidates below accepted nodes are evidence. Once its parent is accepted, a candidate's context is the
text itself, so its depth carries no further information and is not part of the map.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.growth import Chances, Children
from edgespec.speculation.learning.pair import Pair
from edgespec.speculation.learning.tables import Counts, Table, TableStore
from edgespec.speculation.tree import FloatArray

_LOGITS = np.linspace(-7.0, 7.0, 15)  # of the estimated probability: the cells of the map
_RANKS = np.array([0, 1, 2, 2, 3])  # rank -> class; later ranks are in the last class
_UNLISTED, _UNASKED = 4, 5  # proposed by the text alone: the drafter listed others, or was not asked
_LONGEST_MATCH = 4
_PRIOR = 12.0  # weight of the prior in each cell, in candidates

# By tokens matched: how much the log-odds rise if the text continued this way before, and the log-odds of
# candidates that the drafter did not list or was not asked about.
_MATCH_BONUS = np.array([0.0, 0.2, 0.5, 0.8, 1.2])
_UNLISTED_LOGITS = np.array([-9.0, -5.0, -4.0, -3.5, -3.0])
_UNASKED_LOGITS = np.array([-9.0, -1.7, -0.4, 0.4, 1.1])


class Calibrated(Chances):
    """The learned map.

    Args:
        store: where the counts are kept.
        name: name of the counts; greedy and sampled choices have their own.
        pair: the corrections for this pair, which the ranking uses and which learn here.
    """

    def __init__(self, store: TableStore, name: str, pair: Pair | None = None) -> None:
        self.pair = pair or Pair(store)
        self._store = store
        self._counts = Counts(store, f"{name} map", (_UNASKED + 1, _LONGEST_MATCH + 1, len(_LOGITS)))
        self._map: Table | None = None

    def edges(self, children: Children) -> FloatArray:
        ranks, matches, low, part = _cells(children)
        chances = self.map
        logits = (1 - part) * chances[ranks, matches, low] + part * chances[ranks, matches, low + 1]
        edges = -np.log1p(np.exp(-logits))
        edges[~children.proposed] = -np.inf
        return edges.astype(np.float32)

    @property
    def map(self) -> Table:
        """(rank classes, match classes, cells) logits of acceptance, rising along the cells."""
        if self._map is None:
            self._map = _fitted(self._counts.tried, self._counts.taken)
        return self._map

    def learn(self, children: Children, after: int, token: int) -> None:
        self._counts.fade()
        ranks, matches, low, part = _cells(children)
        real = children.proposed
        taken = (children.tokens[real] == token).astype(np.float64)
        for column, weight in ((low, 1 - part), (low + 1, part)):
            self._counts.add((ranks[real], matches[real], column[real]), weight[real], taken)
        self._map = None
        self.pair.learn(children, after, token)

    def keep(self) -> None:
        self._counts.keep()
        self.pair.keep()
        self._store.keep()


def _cells(children: Children) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], Table]:
    """Where candidates fall: rank class, match class, the cell below their logit, and the distance to it."""
    listed = np.isfinite(children.logprobs)
    columns = np.arange(listed.shape[1])
    alone = np.where(listed.any(axis=1, keepdims=True), _UNLISTED, _UNASKED)
    ranks = np.where(listed, _RANKS[np.minimum(columns, len(_RANKS) - 1)], alone)
    if children.matches is None:
        matches = np.zeros(listed.shape, dtype=np.intp)
    else:
        matches = np.minimum(children.matches, _LONGEST_MATCH).astype(np.intp)
    logprobs = np.clip(np.where(listed, children.logprobs, -8.0), -8.0, -1e-6).astype(np.float64)
    logits = logprobs - np.log(-np.expm1(logprobs))
    place = np.clip((logits - _LOGITS[0]) / (_LOGITS[1] - _LOGITS[0]), 0, len(_LOGITS) - 1.001)
    low = place.astype(np.intp)
    return ranks, matches, low, place - low


def _fitted(tried: Table, taken: Table) -> Table:
    """The map as logits, in the shape of the counts."""
    prior = np.broadcast_to(_LOGITS, tried.shape).copy()
    prior[_UNLISTED] = _UNLISTED_LOGITS[:, None]
    prior[_UNASKED] = _UNASKED_LOGITS[:, None]
    fitted = np.empty_like(tried)
    fitted[:, 0] = _with_counts(prior[:, 0], tried[:, 0], taken[:, 0])
    # Where the text matches, the prior is what was learned for the rank, plus a bonus.
    prior[:_UNLISTED, 1:] = fitted[:_UNLISTED, :1] + _MATCH_BONUS[1:, None]
    fitted[:, 1:] = _with_counts(prior[:, 1:], tried[:, 1:], taken[:, 1:])
    return fitted


def _with_counts(prior: Table, tried: Table, taken: Table) -> Table:
    """(..., cells) logits from the prior's logits and the counts."""
    weights = tried + _PRIOR
    chances = (taken + _PRIOR / (1 + np.exp(-prior))) / weights
    for row in np.argwhere((np.diff(chances) < 0).any(axis=-1)):
        place = tuple(row)
        chances[place] = _pooled(chances[place], weights[place])
    chances = chances.clip(1e-6, 1 - 1e-6)
    # A little of the prior's slope separates cells that were pooled.
    return 0.95 * np.log(chances / (1 - chances)) + 0.05 * prior


def _pooled(chances: Table, weights: Table) -> Table:
    """Probabilities by cell, pooled so that they never fall."""
    pools: list[tuple[float, float, int]] = []  # chance, weight, cells
    for chance, weight in zip(chances.tolist(), weights.tolist(), strict=True):
        cells = 1
        while pools and pools[-1][0] >= chance:
            before, heft, more = pools.pop()
            chance = (before * heft + chance * weight) / (heft + weight)
            weight += heft
            cells += more
        pools.append((chance, weight, cells))
    return np.repeat([chance for chance, _, _ in pools], [cells for _, _, cells in pools])
