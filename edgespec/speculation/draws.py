"""Random draws for drafting and verification, the same ones for the same seed and position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.noise import NoiseStream, philox


class Draws(Protocol):
    """The random decisions that a verification rule may ask for.

    A rule states the probability of each decision instead of comparing random numbers itself. Tests can
    therefore enumerate every outcome, and compute the exact distribution of the rule's result.
    """

    def coin(self, chance: float) -> bool:
        """True with this probability; always true from 1 upwards."""

    def pick(self, weights: NDArray[np.float64]) -> int:
        """An index, with a probability proportional to its weight; at least one weight must be above 0."""


DrawSource = Callable[[NoiseStream, int], Draws]  # by stream and position in the sequence


class SeededDraws:
    """Draws from Philox, one sequence for each (seed, stream, position)."""

    def __init__(self, seed: int, stream: NoiseStream, position: int) -> None:
        self._uniform = np.random.Generator(philox(seed, stream, position))

    def coin(self, chance: float) -> bool:
        return self._uniform.random() < chance

    def pick(self, weights: NDArray[np.float64]) -> int:
        cumulative = np.cumsum(weights)
        total = cumulative[-1]
        # Rounding must not make the product equal to the total, beyond which there is no index. The first sum
        # that exceeds the product never belongs to a weight of 0.
        at = min(self._uniform.random() * total, np.nextafter(total, 0))
        return int(np.searchsorted(cumulative, at, side="right"))
