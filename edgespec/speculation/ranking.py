"""How a drafter's logits become candidates, best first, each with the log of an estimated chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgespec.generation import GenerationConfig
from edgespec.speculation.counts import Table
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.pair import Pair
from edgespec.speculation.tree import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

_COMPARED = 64  # best candidates whose chances sum up to 1: the others together hold next to nothing
_KEPT_NOISE = 64  # positions whose noise is kept; a tree spans few


class Ranking(Protocol):
    """Turns logits into the best candidates and the log of the chance that the target takes each."""

    def best(
        self, logits: torch.Tensor, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        """The `count` best candidates a row.

        Args:
            logits: (rows, n_vocab) the drafter's; not changed.
            positions: the position in the text that each row's candidates would take.
            after: (rows,) the token that each row's candidates follow, where it is known.
        """

    def expanding(self, frontier: Frontier, rows: Sequence[int]) -> None:
        """Told before `best` which nodes its rows of logits belong to.

        Args:
            rows: indices into the frontier; node 0 begins another tree.
        """
        del frontier, rows  # most rankings do not look at paths

    def screened(self, frontier: Frontier, children: Children) -> Children:
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
        self, logits: torch.Tensor, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        values, tokens = logits.topk(min(count, logits.shape[1]), dim=1)
        top = values[:, :1]
        if self._temperature == 1:
            sums = logits.logsumexp(dim=1, keepdim=True) - top
        else:
            sums = ((logits - top) / self._temperature).logsumexp(dim=1, keepdim=True)
        return Children(tokens.numpy().astype(np.int32), ((values - top) / self._temperature - sums).numpy())


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
        self._kept: dict[int, FloatArray] = {}
        # Megabytes, filled anew in every draft step: memory that is given back is dear to get again.
        self._scores = np.empty((0, 0), dtype=np.float32)

    def best(
        self, logits: torch.Tensor, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        values, tokens = self.top(logits, positions)
        if after is None:
            after = np.full(len(positions), -1, dtype=np.int32)
        return self._pair.children(tokens, values, after, count)

    def top(self, logits: torch.Tensor, positions: list[int]) -> tuple[Table, IntArray]:
        """(rows, candidates) values and tokens of the drafter's best, before the pair's correction."""
        scores = logits if self._config.greedy else self._perturbed(logits, positions)
        values, tokens = scores.topk(min(_COMPARED, logits.shape[1]), dim=1)
        return values.numpy().astype(np.float64), tokens.numpy().astype(np.int32)

    def _perturbed(self, logits: torch.Tensor, positions: list[int]) -> torch.Tensor:
        import torch

        if len(self._scores) < len(logits) or self._scores.shape[1] != logits.shape[1]:
            self._scores = np.empty(logits.shape, dtype=np.float32)
        # By row, as torch would have its threads wait for each other over so little.
        for row, values, position in zip(self._scores, logits.numpy(), positions, strict=False):
            np.add(values, self._at(position)[: len(values)], out=row)
        scores = torch.from_numpy(self._scores[: len(logits)])
        cut = self._cut(logits)
        if cut is not None:
            scores.masked_fill_(logits < cut - self._pair.nats, -math.inf)
        return scores

    def _at(self, position: int) -> FloatArray:
        """(n_vocab,) what the noise of a position adds to logits."""
        if position not in self._kept:
            while len(self._kept) >= _KEPT_NOISE:
                del self._kept[next(iter(self._kept))]
            noise = self._config.temperature * self._noise.at(position)
            self._kept[position] = noise.astype(np.float32)
        return self._kept[position]

    def _cut(self, logits: torch.Tensor) -> torch.Tensor | None:
        """(rows, 1) the logit below which the drafter itself would not draw; None if it draws from all."""
        c = self._config
        if not (0 < c.top_k < logits.shape[1] or c.top_p < 1 or c.min_p > 0):
            return None
        best = logits.topk(min(256, logits.shape[1]), dim=1).values
        cut = best[:, -1:] - math.inf
        if 0 < c.top_k <= best.shape[1]:
            cut = cut.maximum(best[:, c.top_k - 1 : c.top_k])
        if c.top_p < 1:
            # In the set until it holds top_p: the first token always is.
            before = best.softmax(dim=1).cumsum(dim=1).roll(1, dims=1)
            before[:, 0] = 0
            inside = (before < c.top_p).sum(dim=1, keepdim=True)
            cut = cut.maximum(best.gather(1, inside - 1))
        if c.min_p > 0:
            cut = cut.maximum(best[:, :1] + math.log(c.min_p))
        return cut
