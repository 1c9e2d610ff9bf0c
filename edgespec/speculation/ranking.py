"""Ranking: from the drafter's logits to candidates, best first, each with an estimated log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.adjustments import Adjustments
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.learning.tables import Table
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.sampling import excludes, left_by_xtc, sigma_cut
from edgespec.speculation.top import log_sums, top
from edgespec.speculation.tree import FloatArray, IntArray

_COMPARED = 64  # best candidates that share all the probability: the rest would hold next to none
_CUT_AMONG = 256  # best candidates among which the cutoff of a filter is searched


class Ranking(Protocol):
    """Turns logits into the best candidates, with the log-probability that the target chooses each."""

    def begin(self, sequence: Sequence[int]) -> None:
        """Called before a tree grows at the end of a sequence."""
        del sequence  # most rankings do not depend on it

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        """The `count` best candidates of each row.

        Args:
            logits: (rows, n_vocab) the drafter's; they are not modified.
            positions: the position in the sequence that each row's candidates would have.
            after: (rows,) the token that each row's candidates follow, where it is known.
        """

    def before_ranking(self, frontier: Frontier, rows: Sequence[int]) -> None:
        """Called with the nodes of every draft step, before `best` where candidates of some are ranked.

        Args:
            rows: indices into the frontier of the nodes that the rows of logits belong to.
        """
        del frontier, rows  # most rankings do not depend on the path

    def filtered(self, frontier: Frontier, children: Children, start: int) -> Children:
        """All candidates of a draft step, without those among the sources' that the ranking rules out.

        Args:
            start: the position of a child of the tree's root.
        """
        del frontier, start
        return children


class PathRanking(Ranking):
    """A ranking that adapts another one to what comes before each candidate.

    The wrapped ranking is given changed logits, so it is the same for all trees of an answer.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.sequence: Sequence[int] = ()
        self._paths: dict[int, tuple[int, ...]] = {}

    def begin(self, sequence: Sequence[int]) -> None:
        self.ranking.begin(sequence)
        self.sequence, self._paths = sequence, {0: ()}

    def before_ranking(self, frontier: Frontier, rows: Sequence[int]) -> None:
        self.ranking.before_ranking(frontier, rows)
        paths = self.paths(frontier)
        self.about_to_rank([paths[row] for row in rows])

    def about_to_rank(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Called before `best`, with the path to the node of each row."""

    def filtered(self, frontier: Frontier, children: Children, start: int) -> Children:
        return self.ranking.filtered(frontier, children, start)

    def paths(self, frontier: Frontier) -> list[tuple[int, ...]]:
        """The tokens from the root, without it, to each node of a frontier."""
        for node, parent, token, _ in frontier.rows():
            # Only the root has no parent. Nodes that are read ahead have numbers below 0, and so has the
            # parent of those below them.
            if node != 0:
                self._paths[node] = (*self._paths[parent], token)
        return [self._paths[node] for node in frontier.nodes.tolist()]


class AdjustedRanking(PathRanking):
    """Ranks by the drafter's logits with the bias and the penalties that the target's get."""

    def __init__(self, ranking: Ranking, adjustments: Adjustments) -> None:
        super().__init__(ranking)
        self._adjustments = adjustments
        self._ranked: Sequence[tuple[int, ...]] = ()

    def about_to_rank(self, paths: Sequence[tuple[int, ...]]) -> None:
        self._ranked = paths

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        assert len(self._ranked) == len(logits), "the nodes of the rows were not announced"
        if not logits.flags.writeable or logits.strides[0] == 0:  # one row, repeated
            logits = logits.copy()
        adjusted = zip(logits, self._ranked, strict=True)
        originals = [self._adjustments.adjust(row, self.sequence, path) for row, path in adjusted]
        for row, original in zip(logits, originals, strict=True):
            if np.isneginf(row.max()):  # all is banned, and a row of nothing but -inf could not be ranked
                original.restore()
        try:
            return self.ranking.best(logits, positions, count, after)
        finally:
            for original in originals:
                original.restore()


class ProbabilityRanking(Ranking):
    """By the drafter's probability, as published tree policies rank.

    Args:
        temperature: the target's; 1 for greedy decoding.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        # The smallest value whose inverse is finite in single precision.
        self._temperature = max(temperature, 1e-37)

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        values, tokens = top(logits, count)
        best = values[:, :1]
        with np.errstate(over="ignore"):
            scores = (values - best) / np.float32(self._temperature)
        return Children(tokens, scores - log_sums(logits, best, self._temperature))


class ConfidenceFloor(Ranking):
    """Ends a draft where the drafter's best candidate is less likely than `floor` (BiLD's fallback)."""

    def __init__(self, floor: float) -> None:
        self._floor = floor

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        children = ProbabilityRanking().best(logits, positions, count, after)
        unsure = np.exp(children.logprobs[:, :1]) < self._floor
        return Children(children.tokens, np.where(unsure, np.float32(-np.inf), children.logprobs))


class CalibratedRanking(Ranking):
    """By the probability that the target chooses a candidate, from what was learned about the pair.

    A target that samples takes the argmax of logit + temperature x noise. Both sides know the noise, so the
    drafter ranks by the same sum; greedy decoding is the case without noise. The target's filters (top-k,
    top-p, min-p) cut by its own probabilities, which the drafter knows only approximately: it leaves out what
    lies below its own cutoff by more than the disagreement.
    """

    def __init__(self, config: GenerationConfig, noise: GumbelNoise, calibration: DrafterCalibration) -> None:
        self._config = config
        self._noise = noise
        self._calibration = calibration
        self._scores = np.empty(0, dtype=np.float32)  # of one row: allocating it for each would be slow

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        values, tokens = self.candidates(logits, positions)
        if after is None:
            after = np.full(len(positions), -1, dtype=np.int32)
        return self._calibration.children(tokens, values, after, count)

    def filtered(self, frontier: Frontier, children: Children, start: int) -> Children:
        """The candidates, with the noise that the target adds to each."""
        if self._config.greedy or children.evidence is None:
            return children
        noise = [
            self._noise.at(start + depth, tokens)
            for depth, tokens in zip(frontier.depths.tolist(), children.tokens, strict=True)
        ]
        return replace(children, noise=np.array(noise, dtype=np.float32))

    def candidates(self, logits: FloatArray, positions: list[int]) -> tuple[Table, IntArray]:
        """(rows, candidates) values and tokens of the drafter's best, before the pair's correction."""
        if len(logits) > 1 and logits.strides[0] == 0 and len(set(positions)) == 1:  # one row, repeated
            first = self.candidates(logits[:1], positions[:1])
            return np.repeat(first[0], len(logits), axis=0), np.repeat(first[1], len(logits), axis=0)
        if not self._config.draws:
            values, tokens = top(logits, _COMPARED)
        else:
            rows = zip(logits, positions, strict=False)
            found = [self._top_perturbed(row, position) for row, position in rows]
            values, tokens = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return values.astype(np.float64), tokens

    def _top_perturbed(self, row: FloatArray, position: int) -> tuple[FloatArray, IntArray]:
        """(1, candidates) the best of a row with noise, of the tokens that the filters may leave."""
        c = self._config
        least = cut = np.float32(-np.inf)
        excluded: NDArray[np.int64] | None = None
        best, tokens = np.empty((1, 0), dtype=np.float32), np.empty((1, 0), dtype=np.int32)
        if 0 < c.top_k < len(row) or c.top_p < 1 or c.min_p > 0 or c.top_n_sigma > 0:
            best, tokens = top(row[None], _CUT_AMONG)
            cut = self._cut(row, best[0])
            least = cut - np.float32(self._calibration.nats)
        if excludes(c, self._noise.seed, position):
            possible = np.flatnonzero(row >= cut)
            excluded = np.delete(possible, left_by_xtc(row[possible], possible, c.xtc_threshold))
        inside = best[0] >= least
        if not inside.all():  # the tokens outside of the best are too, and need no noise
            left = np.sort(tokens[0, inside])
            if excluded is not None:
                left = left[~np.isin(left, excluded)]
            scores = row[left] if c.greedy else row[left] + self._noise.scaled(position, c.temperature, left)
            return _top_of(left, scores, len(row))
        if len(self._scores) != len(row):
            self._scores = np.empty(len(row), dtype=np.float32)
        noise = 0.0 if c.greedy else self._noise.scaled(position, c.temperature)[: len(row)]
        np.add(row, noise, out=self._scores)
        if least > -np.inf:
            np.copyto(self._scores, -np.inf, where=row < least)
        if excluded is not None:
            self._scores[excluded] = -np.inf
        return top(self._scores[None], _COMPARED)

    def _cut(self, row: FloatArray, best: FloatArray) -> np.float32:
        """The logit below which the filters would cut the drafter.

        Args:
            row: (n_vocab,) its logits.
            best: (n,) the largest of them, the largest first.
        """
        c = self._config
        cut = np.float32(-np.inf)
        if c.top_n_sigma > 0:
            cut = sigma_cut(row, c.top_n_sigma)
        if 0 < c.top_k <= len(best):
            cut = max(cut, best[c.top_k - 1])
        if c.top_p < 1:
            weights = np.exp(best - best[0])
            sums = np.cumsum(weights / weights.sum())
            # A token is in the set if those before it hold less than top_p, so the first one always is.
            cut = max(cut, best[(sums[:-1] < c.top_p).sum()])
        if c.min_p > 0:
            cut = max(cut, best[0] + np.float32(math.log(c.min_p)))
        return cut


def _top_of(tokens: IntArray, scores: FloatArray, n_vocab: int) -> tuple[FloatArray, IntArray]:
    """(1, candidates) what `top` finds in a row with these scores, in which all other tokens have -inf.

    Args:
        tokens: (n,) in ascending order.
        scores: (n,) of these tokens.
    """
    count = min(_COMPARED, n_vocab)
    best = np.argsort(-scores, kind="stable")[:count]
    found, values = tokens[best], scores[best]
    missing = count - len(found)
    if missing:
        others = np.setdiff1d(np.arange(min(count + len(tokens), n_vocab)), tokens)[:missing]
        found = np.concatenate([found, others])
        values = np.concatenate([values, np.full(missing, -np.inf, dtype=np.float32)])
    return values[None], found[None].astype(np.int32)
