"""How a drafter's logits become candidates, best first, each with the log of an estimated chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.learning.pair import Pair
from edgespec.speculation.learning.tables import Table
from edgespec.speculation.noise import GumbelNoise, NoiseCache
from edgespec.speculation.top import log_sums, top
from edgespec.speculation.tree import FloatArray, IntArray

_COMPARED = 64  # best candidates whose chances sum up to 1: the others together hold next to nothing
_CUT_AMONG = 256  # best candidates among which a filter's cut is looked for


class Ranking(Protocol):
    """Turns logits into the best candidates and the log of the chance that the target takes each."""

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        """The `count` best candidates a row.

        Args:
            logits: (rows, n_vocab) the drafter's; not changed.
            positions: the position in the text that each row's candidates would take.
            after: (rows,) the token that each row's candidates follow, where it is known.
        """

    def before_ranking(self, frontier: Frontier, rows: Sequence[int]) -> None:
        """Told before `best` which nodes its rows of logits belong to.

        Args:
            rows: indices into the frontier; node 0 begins another tree.
        """
        del frontier, rows  # most rankings do not look at paths

    def filtered(self, frontier: Frontier, children: Children) -> Children:
        """Candidates that others proposed, without those that the ranking rules out."""
        del frontier
        return children


class ByProbability(Ranking):
    """The drafter's probability, as published trees rank.

    Args:
        temperature: the target's; 1 where it takes its most likely token.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        # The least value whose inverse is finite in single precision.
        self._temperature = max(temperature, 1e-37)

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        values, tokens = top(logits, count)
        best = values[:, :1]
        with np.errstate(over="ignore"):
            scores = (values - best) / np.float32(self._temperature)
        return Children(tokens, scores - log_sums(logits, best, self._temperature))


class ByAgreement(Ranking):
    """The chance that the target takes a candidate, from what is known of the pair.

    A target that samples takes the argmax of logit + temperature x noise, and the noise is known to both
    sides; so the drafter ranks by the same sum. One that does not sample is the case without noise.
    Filters of the target (top-k, top-p, min-p) cut where the target's own probabilities say, which the
    drafter only knows about: it leaves out what is beyond its own cut by more than the disagreement.
    """

    def __init__(self, config: GenerationConfig, noise: GumbelNoise, pair: Pair) -> None:
        self._config = config
        self._noise = noise
        self._pair = pair
        self._kept = NoiseCache(self._added)
        # Megabytes, filled anew in every draft step: memory that is given back is dear to get again.
        self._scores = np.empty((0, 0), dtype=np.float32)

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        values, tokens = self.candidates(logits, positions)
        if after is None:
            after = np.full(len(positions), -1, dtype=np.int32)
        return self._pair.children(tokens, values, after, count)

    def candidates(self, logits: FloatArray, positions: list[int]) -> tuple[Table, IntArray]:
        """(rows, candidates) values and tokens of the drafter's best, before the pair's correction."""
        scores = logits if self._config.greedy else self._perturbed(logits, positions)
        values, tokens = top(scores, _COMPARED)
        return values.astype(np.float64), tokens

    def _perturbed(self, logits: FloatArray, positions: list[int]) -> FloatArray:
        if len(self._scores) < len(logits) or self._scores.shape[1] != logits.shape[1]:
            self._scores = np.empty(logits.shape, dtype=np.float32)
        scores = self._scores[: len(logits)]
        for row, values, position in zip(scores, logits, positions, strict=False):
            np.add(values, self._kept(position)[: len(values)], out=row)
        cut = self._cut(logits)
        if cut is not None:
            np.copyto(scores, -np.inf, where=logits < cut - self._pair.nats)
        return scores

    def _added(self, position: int) -> FloatArray:
        """(n_vocab,) what the noise of a position adds to logits."""
        return (self._config.temperature * self._noise.at(position)).astype(np.float32)

    def _cut(self, logits: FloatArray) -> FloatArray | None:
        """(rows, 1) the logit below which the drafter itself would not draw; None if it draws from all."""
        c = self._config
        if not (0 < c.top_k < logits.shape[1] or c.top_p < 1 or c.min_p > 0):
            return None
        best, _ = top(logits, _CUT_AMONG)
        cut = np.full((len(best), 1), -np.inf, dtype=np.float32)
        if 0 < c.top_k <= best.shape[1]:
            cut = np.maximum(cut, best[:, c.top_k - 1 : c.top_k])
        if c.top_p < 1:
            weights = np.exp(best - best[:, :1])
            sums = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
            # A token is in the set until those before it hold top_p: the first one always is.
            inside = 1 + (sums[:, :-1] < c.top_p).sum(axis=1, keepdims=True)
            cut = np.maximum(cut, np.take_along_axis(best, inside - 1, axis=1))
        if c.min_p > 0:
            cut = np.maximum(cut, best[:, :1] + np.float32(math.log(c.min_p)))
        return cut
