"""Shared noise: one Gumbel vector for each (seed, position), the same in every run.

The token at a position is the argmax of log-probability plus noise, which is a draw from the distribution
(the Gumbel-max trick). The draw depends only on the seed and the target, not on drafter, tree or memory, so
any run can be repeated and compared token by token. A drafter that ranks its candidates with the same noise
tends to draw the same token (Daliri et al. 2025, drafter-invariant sampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.base.latest import LatestValues
from edgespec.speculation.tree import FloatArray

# Of a position: its random bits, which both sides use, and the noise as the drafter adds it to logits.
_BITS_BYTES, _ADDED_BYTES = 8, 4
_FEW = 64  # tokens whose bits are found faster than those of a whole vocabulary are drawn
_MANY = 1024  # tokens of which a few are found faster than the noise of all
_LIKELY = 2.0  # nats below the best
_ROUNDING = 1e-6  # of noise and sums, in nats
_PHILOX_WORDS = 4  # of a block, by which the generator advances
_KEPT_POSITIONS = 32  # a tree spans fewer
_KEPT_BYTES, _KEPT_WITHOUT_DRAFTS = 16 << 20, 4 << 20
_LEAST_KEPT_POSITIONS = 4  # of each of several answers at once, however large the vocabulary


class NoiseStream(IntEnum):
    """The uses of random numbers; the streams of a seed are independent of each other."""

    SHARED = 0  # noise that drafter and target share
    OWN = 1  # noise of the target alone
    DRAFTING = 2
    ACCEPTING = 3
    EXCLUDING = 4  # whether top choices are excluded


def philox(seed: int, stream: NoiseStream, position: int) -> np.random.Philox:
    """The generator of a stream at a position in the sequence; counter-based, so in any order."""
    return np.random.Philox(key=seed, counter=[0, position, stream, 0])


class NoiseCache:
    """The noise used last, shared by the answers of an engine.

    It does not keep the function that makes arrays: as a method of its owner, that would keep both in memory
    until the garbage collector runs, which counts objects and not their megabytes.

    Args:
        max_bytes: limit of the cache; the latest array is kept in any case.
    """

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._kept: LatestValues[NDArray[Any]] = LatestValues(max_bytes)

    def has(self, key: Hashable) -> bool:
        """True if the array of that key is kept."""
        return self._kept.get(key) is not None

    def at(self, key: Hashable, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array of that key, which must not be modified; `make` makes it if it is not kept."""
        found = self._kept.get(key)
        if found is None:
            found = make()
            self._kept.put(key, found, found.nbytes)
        return found


class GumbelNoise:
    """Noise by position.

    Args:
        cache: where what was used last is kept; None for one of its own.
    """

    def __init__(
        self,
        seed: int,
        n_vocab: int,
        stream: NoiseStream = NoiseStream.SHARED,
        cache: NoiseCache | None = None,
    ) -> None:
        self.seed = seed
        self._stream = stream
        self._n_vocab = n_vocab
        self._cache = cache or NoiseCache()

    def at(self, position: int, tokens: NDArray[np.integer] | None = None) -> NDArray[np.float64]:
        """Gumbel(0, 1) noise at a position, for the given tokens or for the whole vocabulary."""
        bits = self._bits(position)
        return _gumbel(bits if tokens is None else bits[tokens])

    def _bits(self, position: int) -> NDArray[np.uint64]:
        return self._cache.at(self._key(position), lambda: self._draw(position))

    def _key(self, position: int) -> tuple[Hashable, ...]:
        return self.seed, self._stream, self._n_vocab, position

    def first_choice(self, position: int, tokens: NDArray[np.integer], scores: NDArray[np.float64]) -> int:
        """The token with the greatest sum of score and noise; of equal ones the first.

        Logarithms of a whole vocabulary take longer than all other steps. Few tokens have so much noise that
        they could be chosen before the likeliest ones, and random bits say which.
        """
        best = scores.max()
        if len(tokens) > _MANY and np.isfinite(best):
            bits = self._bits(position)[tokens]
            likely = scores >= best - _LIKELY
            needed = (scores[likely] + _gumbel(bits[likely])).max() - best + _LIKELY - _ROUNDING
            possible = likely | (bits >= _bits_of(needed))
            tokens, scores = tokens[possible], scores[possible]
        return int(tokens[np.argmax(scores + self.of_few(position, tokens))])

    def of_few(self, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
        """The noise of a few tokens, as `at`, without drawing that of all others."""
        if len(tokens) > _FEW or self._cache.has(self._key(position)):
            return self.at(position, tokens)
        generator = philox(self.seed, self._stream, position)
        bits = np.empty(len(tokens), dtype=np.uint64)
        drawn, block = np.empty(0, dtype=np.uint64), -1
        for place in np.argsort(tokens).tolist():
            wanted, within = divmod(int(tokens[place]), _PHILOX_WORDS)
            if wanted != block:
                generator.advance(wanted - block - 1)
                drawn, block = generator.random_raw(_PHILOX_WORDS), wanted
            bits[place] = drawn[within]
        return _gumbel(bits)

    def scaled(
        self, position: int, temperature: float, tokens: NDArray[np.integer] | None = None
    ) -> FloatArray:
        """The noise of a position times the temperature, as it is added to logits; tokens as in `at`."""
        if tokens is not None:
            return (temperature * self.at(position, tokens)).astype(np.float32)
        key = (*self._key(position), temperature)
        return self._cache.at(key, lambda: (temperature * self.at(position)).astype(np.float32))

    def _draw(self, position: int) -> NDArray[np.uint64]:
        return philox(self.seed, self._stream, position).random_raw(self._n_vocab)


def _gumbel(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Gumbel(0, 1) noise of random bits, of which 52 count."""
    # Centred in their interval: never 0, and not rounded to 1 either.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _bits_of(noise: float) -> np.uint64:
    """The least random bits with at least so much noise."""
    return np.uint64(min(int(math.exp(-math.exp(-noise)) * 2**52), 2**52 - 1) << 12)


def noise_bytes(n_vocab: int, *, drafts: bool, answers: int = 1) -> int:
    """The maximum bytes of noise held for sampled answers.

    Args:
        drafts: whether a drafter ranks its candidates by noise.
        answers: how many are sampled at once.
    """
    of_position = n_vocab * (_BITS_BYTES + _ADDED_BYTES if drafts else _BITS_BYTES)
    usual = _KEPT_BYTES if drafts else _KEPT_WITHOUT_DRAFTS
    least = _LEAST_KEPT_POSITIONS * of_position if answers > 1 else of_position
    return min(answers * _KEPT_POSITIONS * of_position, max(usual, answers * least))
