"""Guessing which experts the next layer will need, and finding out whether that makes passes quicker.

What a layer's router sees changes little from one layer to the next. So the next layer's router, applied to
what this layer's sees, names some of the experts that would be missed, before that layer is reached. But
wrong guesses cost reads, too, and whether these are hidden behind the arithmetic depends on the disk, the
processor and the router. So passes with and without guesses alternate until it is known.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address

Floats = NDArray[np.float32]

_TURN = 8  # passes with, or without, guesses
_ENOUGH = 32  # passes of each kind, to know
_SEEN = 64  # passes of each kind that count: the latest
_GAIN = 0.98  # of the time without guesses: what they must reach
_AGAIN = 512  # passes after which the other way gets a turn


class Guesser:
    """Names the experts that a layer will likely need.

    Routers are found in the graph, behind the nodes that hold their choices, so the first pass that guesses
    only finds them.

    Args:
        n_experts: of each layer whose router stays in memory.
        n_used: experts that each token is sent to.
    """

    def __init__(self, n_experts: Mapping[int, int], n_used: int) -> None:
        self._n_experts = n_experts
        self._n_used = n_used
        self._routers: dict[int, Floats] = {}  # (experts, embedding)

    def guess(self, layer: int, choice: Address, following: int) -> list[int]:
        """Experts of the following layer, the likeliest first; empty if nothing is known.

        Args:
            layer: the one whose router has chosen.
            choice: the node that holds what it has chosen for one row, which has just been computed.
        """
        product = ggml.product_behind(choice)
        if product is None:
            return []
        if layer in self._n_experts and layer not in self._routers:
            self._find_router(layer, product[0])
        seen = ggml.rows_of(product[1])
        router = self._routers.get(following)
        if router is None or seen is None or router.shape[1] != seen.shape[1]:
            return []
        # Not a BLAS product, which would start threads beside those of the graph.
        logits = np.einsum("ij,j->i", router, seen[0])
        likely = np.argpartition(-logits, self._n_used - 1)[: self._n_used]
        found: list[int] = likely[np.argsort(-logits[likely])].tolist()
        return found

    def _find_router(self, layer: int, matrix: Address) -> None:
        found = ggml.rows_of(matrix)
        if found is not None and len(found) == self._n_experts[layer]:
            self._routers[layer] = found


class Trial:
    """Decides whether to guess, by the median times of passes with and without, which alternate at first.

    Later the way that was slower gets a turn now and then, as disks and texts change.

    Attributes:
        forced: whether every pass guesses, or none; None by these times.
    """

    def __init__(self) -> None:
        self.forced: bool | None = None
        self._seconds = {guessing: deque[float](maxlen=_SEEN) for guessing in (False, True)}
        self._passes = 0

    @property
    def guessing(self) -> bool:
        """True if the next pass should guess."""
        if self.forced is not None:
            return self.forced
        turn = self._passes // _TURN
        if min(map(len, self._seconds.values())) < _ENOUGH:
            return turn % 2 == 1
        return self.pays ^ (turn % (_AGAIN // _TURN) == 0)

    @property
    def pays(self) -> bool:
        """True if passes with guesses are quicker, as far as is known."""
        without, guessed = self._seconds[False], self._seconds[True]
        if not without or not guessed:
            return False
        return statistics.median(guessed) < _GAIN * statistics.median(without)

    def add(self, seconds: float) -> None:
        """Count a pass over one row, which guessed as it should."""
        self._seconds[self.guessing].append(seconds)
        self._passes += 1
