"""Calibrated acceptance: from what is known of a candidate to the probability that the target chooses it.

`DrafterCalibration` turns the drafter's logits into probabilities. What is systematically wrong with them is
measured here while decoding: for each rank, the share of candidates that the target chose, as a function of
the estimated probability. A likelier candidate never gets a lower probability (isotonic regression by
pooling adjacent violators, Ayer et al. 1955), and where there are few counts, a prior decides.

What other sources say of a candidate (see `evidence`) changes its log-odds. Each source starts with rough
values, and each class of its evidence has a correction, a Gaussian that every choice of the target updates,
as it does the biases of a pair. So a source that is often wrong soon proposes nothing that is worth a node.

Only candidates below accepted nodes are evidence. Once its parent is accepted, a candidate's context is the
sequence itself, so its depth carries no further information and is not part of the map.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.evidence import CLASSES, NOTHING, CandidateSource, alone_logits
from edgespec.speculation.growth import AcceptanceModel, Children
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.learning.tables import Counts, Table, TableStore
from edgespec.speculation.tree import FloatArray

_LOGITS = np.linspace(-7.0, 7.0, 15)  # of the estimated probability: the cells of the map
_RANKS = np.array([0, 1, 2, 2, 3])  # rank -> class; later ranks are in the last class
_PRIOR = 12.0  # weight of the prior in each cell, in candidates

# What the target found likely after the same two tokens says little beside a drafter that has read the
# sequence.
_KNOWN_BETTER = 4.0

# What the drafter says of a candidate: it lists it, or only others, or was not asked.
_LISTED, _UNLISTED, _UNASKED = range(3)
_STATES = 3


class CalibratedAcceptance(AcceptanceModel):
    """The learned map.

    Args:
        store: where the counts are kept.
        name: name of the counts; greedy and sampled choices have their own.
        calibration: the corrections for this pair, which the ranking uses and which learn here.
    """

    def __init__(self, store: TableStore, name: str, calibration: DrafterCalibration | None = None) -> None:
        self.calibration = calibration or DrafterCalibration(store)
        self._counts = Counts(store, f"{name} map", (len(_RANKS) - 1, len(_LOGITS)))
        self._corrections = _Corrections(store, f"{name} sources")
        self._slope = _NoiseSlope(store, f"{name} noise")
        self._map: Table | None = None

    def logprobs(self, children: Children) -> FloatArray:
        logprobs = -np.log1p(np.exp(-self._logits(_EvidenceCells.of(children), children)))
        logprobs[~children.proposed] = -np.inf
        return logprobs.astype(np.float32)

    @property
    def map(self) -> Table:
        """(rank classes, cells) logits of acceptance, rising along the cells."""
        if self._map is None:
            prior = np.broadcast_to(_LOGITS, self._counts.tried.shape)
            self._map = _with_counts(prior, self._counts.tried, self._counts.taken)
        return self._map

    def learn(self, children: Children, after: int, token: int) -> None:
        cells = _EvidenceCells.of(children)
        real = children.proposed
        taken = (children.tokens == token).astype(np.float64)
        if children.evidence is not None:
            missed = taken - 1 / (1 + np.exp(-self._logits(cells, children)))
            self._corrections.learn(cells.states[real], children.evidence[real], missed[real])
            if children.noise is not None:
                alone = real & (cells.states == _UNASKED)
                self._slope.learn(children.noise[alone], missed[alone])
        self._counts.fade()
        real &= cells.states == _LISTED
        for column, weight in ((cells.low, 1 - cells.part), (cells.low + 1, cells.part)):
            self._counts.add((cells.ranks[real], column[real]), weight[real], taken[real])
        self._map = None
        self.calibration.learn(children, after, token)

    def flush(self) -> None:
        self._counts.flush()
        self._corrections.flush()
        self._slope.flush()
        self.calibration.flush()

    def _logits(self, cells: _EvidenceCells, children: Children) -> Table:
        """(width, branching) log-odds of acceptance."""
        chances = self.map
        logits = (1 - cells.part) * chances[cells.ranks, cells.low]
        logits += cells.part * chances[cells.ranks, cells.low + 1]
        if children.evidence is None:
            return logits
        alone = alone_logits(children.evidence).astype(np.float64)
        alone[..., CandidateSource.RECYCLED] -= np.where(cells.states == _UNASKED, 0.0, _KNOWN_BETTER)
        alone.sort(axis=-1)
        most, next_most = alone[..., -1], alone[..., -2]
        # A drafter that knows the sequence as well is doubted less than it is believed. Two sources that
        # agree often say the same thing twice.
        logits = np.choose(
            cells.states,
            [
                logits + 0.25 * np.maximum(most + 3, 0),
                0.35 * np.maximum(most, -8) - 4.1,
                np.maximum(most, -20) + 0.3 * np.maximum(next_most + 3, 0),
            ],
        )
        if children.noise is not None:  # a drafter that was asked has ranked by it already
            logits += np.where(cells.states == _UNASKED, self._slope.of(children.noise), 0.0)
        return logits + self._corrections.of(cells.states, children.evidence)


@dataclass(frozen=True)
class _EvidenceCells:
    """The cells of the map that candidates fall into.

    Attributes:
        states: (width, branching) what the drafter says of each.
        ranks: (width, branching) class of its rank.
        low, part: (width, branching) the cell below its estimated logit, and the distance to it.
    """

    states: NDArray[np.intp]
    ranks: NDArray[np.intp]
    low: NDArray[np.intp]
    part: Table

    @classmethod
    def of(cls, children: Children) -> _EvidenceCells:
        listed = np.isfinite(children.logprobs)
        alone = np.where(listed.any(axis=1, keepdims=True), _UNLISTED, _UNASKED)
        ranks = np.broadcast_to(_RANKS[np.minimum(np.arange(listed.shape[1]), len(_RANKS) - 1)], listed.shape)
        logprobs = np.clip(np.where(listed, children.logprobs, -8.0), -8.0, -1e-6).astype(np.float64)
        logits = logprobs - np.log(-np.expm1(logprobs))
        place = np.clip((logits - _LOGITS[0]) / (_LOGITS[1] - _LOGITS[0]), 0, len(_LOGITS) - 1.001)
        low = place.astype(np.intp)
        return cls(np.where(listed, _LISTED, alone), ranks, low, place - low)


class _NoiseSlope:
    """The change of a candidate's log-odds by the noise that the target adds to it.

    The noise of a candidate with a known probability would count in full: it is chosen if its log-odds plus
    the noise exceed the best noise of all others. The less is known of the probability, the less it counts.
    One number says how much, learned like the corrections.
    """

    _USUAL, _SPREAD = 0.6, 0.3  # prior mean and standard deviation
    _MOST = 1.5
    _LEAST_NOISE, _MEAN_NOISE, _MAX_NOISE = -2.0, 0.5772, 6.0

    def __init__(self, store: TableStore, name: str) -> None:
        self._store = store
        self._name = name
        known = store.get(name, (2,))
        self._slope, self._information = self._USUAL, 0.0
        if known is not None and 0 <= known[0] <= self._MOST and known[1] >= 0:
            self._slope, self._information = float(known[0]), float(known[1])
        self._changed = False

    def of(self, noise: FloatArray) -> Table:
        """Return the effect of noise on log-odds."""
        return self._slope * self._felt(noise)

    def learn(self, noise: FloatArray, missed: Table) -> None:
        """A natural-gradient step; `missed` as for the corrections."""
        self._changed = True
        felt = self._felt(noise)
        chances = np.clip(np.abs(missed), 1e-3, 1 - 1e-3)
        self._information = self._information * _Corrections.FADE + float(
            (chances * (1 - chances) * felt**2).sum()
        )
        step = float((missed * felt).sum()) / (self._information + self._SPREAD**-2)
        self._slope = float(np.clip(self._slope + step, 0, self._MOST))

    def flush(self) -> None:
        """Hand the slope to the store, if there is a new one."""
        if self._changed:
            self._store.put(self._name, np.array([self._slope, self._information]))
            self._changed = False

    def _felt(self, noise: FloatArray) -> Table:
        return np.clip(noise, self._LEAST_NOISE, self._MAX_NOISE).astype(np.float64) - self._MEAN_NOISE


class _Corrections:
    """Corrections learned for each class of each source's evidence: a Gaussian in log-odds."""

    _SPREAD = 0.8  # prior standard deviation
    _MOST = 6.0
    FADE = 1 - 1 / 4000  # of what is known, per step

    def __init__(self, store: TableStore, name: str) -> None:
        self._store = store
        self._name = name
        shape = (2, _STATES, len(CandidateSource), CLASSES)
        known = store.get(name, shape)
        self._table = np.zeros(shape) if known is None else known.astype(np.float64)
        self._nats, self._information = self._table
        np.clip(self._nats, -self._MOST, self._MOST, out=self._nats)
        np.maximum(self._information, 0, out=self._information)
        self._changed = False

    def of(self, states: NDArray[np.intp], evidence: NDArray[np.int8]) -> Table:
        """The sum of what the sources' evidence changes, in the shape of the states."""
        nats: Table = self._nats[states[..., None], np.arange(len(CandidateSource)), evidence].sum(axis=-1)
        return nats

    def learn(self, states: NDArray[np.intp], evidence: NDArray[np.int8], missed: Table) -> None:
        """A natural-gradient step on the likelihood, shared by the sources that know a candidate's context.

        Args:
            states: (candidates,).
            evidence: (candidates, sources).
            missed: (candidates,) 1 for the target's choice and 0 for the others, less the estimated chance.
        """
        self._changed = True
        self._information *= self.FADE
        candidate, source = (evidence != NOTHING).nonzero()
        cells = states[candidate], source, evidence[candidate, source].astype(np.intp)
        sources = np.bincount(candidate, minlength=1)[candidate]
        chances = np.clip(np.abs(missed), 1e-3, 1 - 1e-3)[candidate]
        np.add.at(self._information, cells, chances * (1 - chances))
        steps = missed[candidate] / sources / (self._information[cells] + self._SPREAD**-2)
        np.add.at(self._nats, cells, steps)
        np.clip(self._nats, -self._MOST, self._MOST, out=self._nats)

    def flush(self) -> None:
        """Hand the corrections to the store, if there are new ones."""
        if self._changed:
            self._store.put(self._name, self._table)
            self._changed = False


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
