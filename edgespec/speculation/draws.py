"""Chance: coins and draws for drafting and for accepting, the same ones for the same seed and position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.noise import Stream, philox


class Draws(Protocol):
    """All that a rule may ask of chance.

    A rule states the probability of what it asks for, instead of comparing numbers itself, so that the exact
    law of its outcome can be found by trying every answer.
    """

    def coin(self, chance: float) -> bool:
        """True with this probability; always from 1 on."""

    def pick(self, weights: NDArray[np.float64]) -> int:
        """An index, with a probability that is proportional to its weight; some weight must be above 0."""


DrawSource = Callable[[Stream, int], Draws]  # by stream and position of the text


class SeededDraws:
    """Uniform numbers from Philox, a sequence for each (seed, stream, position)."""

    def __init__(self, seed: int, stream: Stream, position: int) -> None:
        self._uniform = np.random.Generator(philox(seed, stream, position))

    def coin(self, chance: float) -> bool:
        return self._uniform.random() < chance

    def pick(self, weights: NDArray[np.float64]) -> int:
        cumulative = np.cumsum(weights)
        total = cumulative[-1]
        # Rounding must not make the product the total, behind which there is no index. The first sum that
        # exceeds it is never that of a weight of 0.
        at = min(self._uniform.random() * total, np.nextafter(total, 0))
        return int(np.searchsorted(cumulative, at, side="right"))
