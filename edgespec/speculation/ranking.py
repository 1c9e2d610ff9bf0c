"""How a drafter's logits become scores of candidates: an estimate of what the target will choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgespec.generation import GenerationConfig
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.noise import GumbelNoise

if TYPE_CHECKING:
    import torch

# Candidates that take part in the draw. The target's sample lies outside the drafter's best few hundred
# rarely, and never cheaply.
_DRAWN_FROM = 256

# How sure a drafter's perturbed ranking is of the target's: the scale of the difference between the
# two models' log-probabilities, in nats.
_DISAGREEMENT = 0.6


class Ranking(Protocol):
    """Turns logits into the best candidates and the log of the chance that the target takes each."""

    def best(self, logits: torch.Tensor, positions: list[int], count: int) -> Children:
        """The `count` best candidates a row.

        Args:
            logits: (rows, n_vocab) the drafter's; not changed.
            positions: the position in the text that each row's candidates would take.
        """

    def expanding(self, frontier: Frontier, rows: Sequence[int]) -> None:
        """Told before `best` which nodes its rows of logits belong to.

        Args:
            rows: indices into the frontier; node 0 begins another tree.
        """
        del frontier, rows  # most rankings do not look at paths


class ByProbability(Ranking):
    """Ranks by the drafter's probability: for a target that takes its most likely token."""

    def best(self, logits: torch.Tensor, positions: list[int], count: int) -> Children:
        values, tokens = logits.topk(min(count, logits.shape[1]), dim=1)
        return Children(
            tokens.numpy().astype(np.int32),
            (values - logits.logsumexp(dim=1, keepdim=True)).numpy(),
        )


class BySharedNoise(Ranking):
    """Ranks by log-probability plus the target's own noise: for a target that samples with it.

    The target takes the argmax of its log-probability plus the same noise, so the drafter's perturbed
    order is the best guess of the target's; how far the best candidate is ahead says how sure it is.
    """

    def __init__(self, config: GenerationConfig, noise: GumbelNoise) -> None:
        self._temperature = config.temperature
        self._drawn_from = min(config.top_k or _DRAWN_FROM, _DRAWN_FROM)
        self._noise = noise

    def best(self, logits: torch.Tensor, positions: list[int], count: int) -> Children:
        values, tokens = logits.topk(min(self._drawn_from, logits.shape[1]), dim=1)
        candidates = tokens.numpy()
        noise = np.stack([self._noise.at(p, row) for p, row in zip(positions, candidates, strict=True)])
        behind = (values - values[:, :1]).numpy().astype(np.float64)
        with np.errstate(over="ignore"):  # where the temperature is next to nothing
            perturbed = (behind / self._temperature + noise) / _DISAGREEMENT
            perturbed -= perturbed.max(axis=1, keepdims=True)
            scores = perturbed - np.log(np.exp(perturbed).sum(axis=1, keepdims=True))
            order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            return Children(
                np.take_along_axis(candidates, order, axis=1).astype(np.int32),
                np.take_along_axis(scores, order, axis=1).astype(np.float32),
            )


def ranking_for(config: GenerationConfig, noise: GumbelNoise) -> Ranking:
    """The ranking that fits how the target chooses."""
    return ByProbability() if config.greedy else BySharedNoise(config, noise)
