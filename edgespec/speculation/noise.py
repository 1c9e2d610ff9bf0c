"""Shared noise: one Gumbel vector for each (seed, position), the same in every run.

The token at a position is the argmax of log-probability plus noise, which is a draw from the distribution
(the Gumbel-max trick). The draw depends only on the seed and the target, not on drafter, tree or memory, so
any run can be repeated and compared token by token. A drafter that ranks its candidates with the same noise
tends to draw the same token (Daliri et al. 2025, drafter-invariant sampling).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Limits of the caches: of noise as the drafter adds it to logits, and of random bits, which both sides use.
KEPT_BYTES = 12 << 20
_BITS_BYTES = 4 << 20
_KEPT_POSITIONS = 32  # a tree spans fewer


class NoiseStream(IntEnum):
    """The uses of random numbers; the streams of a seed are independent of each other."""

    SHARED = 0  # noise that drafter and target share
    OWN = 1  # noise of the target alone
    DRAFTING = 2
    ACCEPTING = 3


def philox(seed: int, stream: NoiseStream, position: int) -> np.random.Philox:
    """The generator of a stream at a position in the sequence; counter-based, so in any order."""
    return np.random.Philox(key=seed, counter=[0, position, stream, 0])


class NoiseCache:
    """A small cache of the noise of the latest positions.

    It does not keep the function that makes arrays: as a method of its owner, that would keep both in memory
    until the garbage collector runs, which counts objects and not their megabytes.

    Args:
        most_bytes: limit of the cache; the latest array is kept in any case.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[int, NDArray[Any]] = {}

    def at(self, position: int, make: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        """The array of a position, which must not be modified; `make` makes it if it is not kept."""
        kept = self._kept
        if position not in kept:
            made = make(position)
            while kept and (len(kept) >= _KEPT_POSITIONS or (len(kept) + 1) * made.nbytes > self._most_bytes):
                del kept[next(iter(kept))]
            kept[position] = made
        return kept[position]


class GumbelNoise:
    """Noise by position."""

    def __init__(self, seed: int, n_vocab: int, stream: NoiseStream = NoiseStream.SHARED) -> None:
        self.seed = seed
        self._stream = stream
        self._n_vocab = n_vocab
        self._bits = NoiseCache(_BITS_BYTES)

    def at(self, position: int, tokens: NDArray[np.integer] | None = None) -> NDArray[np.float64]:
        """Gumbel(0, 1) noise at a position, for the given tokens or for the whole vocabulary."""
        bits: NDArray[np.uint64] = self._bits.at(position, self._draw)
        if tokens is not None:
            bits = bits[tokens]
        # 52 random bits, centred in their interval: never 0, and not rounded to 1 either.
        uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        noise: NDArray[np.float64] = -np.log(-np.log(uniform))
        return noise

    def _draw(self, position: int) -> NDArray[np.uint64]:
        return philox(self.seed, self._stream, position).random_raw(self._n_vocab)


def noise_bytes(n_vocab: int, *, drafts: bool) -> int:
    """The maximum bytes of noise held while an answer is sampled; `drafts`: whether a drafter ranks by it."""
    bits = _kept(n_vocab * 8, _BITS_BYTES)
    return bits + _kept(n_vocab * 4, KEPT_BYTES) if drafts else bits


def _kept(array_bytes: int, most_bytes: int) -> int:
    return max(min(_KEPT_POSITIONS * array_bytes, most_bytes), array_bytes)
