"""Sampling: how the target chooses the next token, and follows its choices down a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.adjustments import Adjustments
from edgespec.speculation.draws import SeededDraws
from edgespec.speculation.noise import GumbelNoise, NoiseCache, NoiseStream
from edgespec.speculation.top import top
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree

# Tokens further below the best than this (in nats) usually hold too little probability to matter for top-p.
# The search checks this, and covers all tokens if they do matter.
_NEAR = 16.0
_ROUNDING = 1e-5  # more than sums in single precision are wrong by, in proportion
_MANY = 512  # from so many largest entries on, a partition of the whole array is found faster
_ARRAYS = 8  # double-precision arrays of vocabulary size that exist at a time


def scratch_bytes(n_vocab: int) -> int:
    """The maximum bytes of temporary arrays for one choice, noise included."""
    return _ARRAYS * 8 * n_vocab


def sample_and_match(tree: TokenTree, choose: Callable[[int], int]) -> Acceptance:
    """The target chooses token after token, with no further pass for as long as the tree holds its choice.

    The drafter has no influence on the choice, so the sequence is the target's own whatever the tree
    (SpecExec, Svirschevski et al. 2024, section 4). With greedy choices this is argmax matching; with
    shared noise it is drafter-invariant sampling.

    Args:
        choose: returns the target's token after a node, drawn from its distribution there.
    """
    path = [0]
    while True:
        token = choose(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Acceptance(tuple(path), token)
        path.append(child)


class Sampler:
    """Chooses tokens from logits, always the same ones for the same seed.

    Everything applies in llama.cpp's order: bias, penalties, DRY, top-n-sigma, top-k, top-p, min-p, XTC,
    temperature.

    Args:
        cache: of noise, shared with other answers; None for one of its own.
        adjustments: what changes the logits; None to make it from the settings, which must then do without
            the texts of tokens.
    """

    def __init__(
        self,
        config: GenerationConfig,
        n_vocab: int,
        seed: int = 0,
        stream: NoiseStream = NoiseStream.SHARED,
        cache: NoiseCache | None = None,
        adjustments: Adjustments | None = None,
    ) -> None:
        self.config = config
        self.noise = GumbelNoise(seed, n_vocab, stream, cache)
        self.adjustments = adjustments or Adjustments(config, n_vocab)

    def choose(self, logits: FloatArray, sequence: Sequence[int]) -> int:
        """The token that follows `sequence`.

        Args:
            logits: (n_vocab,) the target's, after the last token of the sequence.
            sequence: all tokens before the one to choose; its length is the position.

        Raises:
            UsageError: banned strings leave no token.
        """
        logits = self._adjusted(logits, sequence)
        if not self.config.draws:
            return int(logits.argmax())
        tokens, scores = self.distribution(logits, len(sequence))
        if self.config.greedy:
            return int(tokens[np.argmax(scores)])
        return self.noise.first_choice(len(sequence), tokens, scores)

    def law(
        self, logits: FloatArray, sequence: Sequence[int], path: Sequence[int] = ()
    ) -> NDArray[np.float64]:
        """(n_vocab,) the probabilities that `choose` draws from, for a temperature above 0.

        Args:
            logits: (n_vocab,) after the last token of the path.
            sequence, path: together, all tokens before the one to choose.
        """
        logits = self._adjusted(logits, sequence, path)
        tokens, scores = self.distribution(logits, len(sequence) + len(path))
        weights = np.exp(scores)
        law = np.zeros(len(logits))
        law[tokens] = weights / weights.sum()
        return law

    def _adjusted(self, logits: FloatArray, sequence: Sequence[int], path: Sequence[int] = ()) -> FloatArray:
        """The adjusted logits; a copy if anything changes."""
        if self.adjustments.exist:
            logits = logits.copy()
            self.adjustments.adjust(logits, sequence, path)
            if self.config.banned_strings and np.isneginf(logits.max()):
                raise UsageError(
                    "The answer cannot continue: only banned strings fit the form that it must have.",
                    "Ban fewer strings, or change the grammar or schema.",
                )
        return logits

    def distribution(
        self, logits: FloatArray, position: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may be drawn, and their log-probabilities up to a common constant."""
        c = self.config
        tokens = np.arange(len(logits))
        if c.top_n_sigma > 0:
            tokens = np.flatnonzero(logits >= sigma_cut(logits, c.top_n_sigma))
        if 0 < c.top_k < len(tokens):
            tokens = tokens[_largest(logits[tokens], c.top_k)]
        left = logits[tokens]
        if c.top_p < 1:
            kept = _top_p(left, c.top_p)
            tokens, left = tokens[kept], left[kept]
        scores = left.astype(np.float64)
        if c.min_p > 0:
            kept = np.flatnonzero(scores >= scores.max() + np.log(c.min_p))
            tokens, scores = tokens[kept], scores[kept]
        if excludes(c, self.noise.seed, position):
            kept = left_by_xtc(scores, tokens, c.xtc_threshold)
            tokens, scores = tokens[kept], scores[kept]
        if c.greedy:
            return tokens, scores
        # Relative to the best, so that no temperature, however low, makes it overflow.
        with np.errstate(over="ignore"):
            return tokens, (scores - scores.max()) / c.temperature


def sigma_cut(logits: FloatArray, sigmas: float) -> np.float32:
    """The least logit that top-n-sigma leaves: that many standard deviations below the best."""
    possible = logits[np.isfinite(logits)]
    return np.float32(possible.max() - sigmas * possible.std(dtype=np.float64))


def excludes(config: GenerationConfig, seed: int, position: int) -> bool:
    """True if XTC ("exclude top choices") applies at a position: a coin tossed by seed and position."""
    return config.xtc_probability > 0 and SeededDraws(seed, NoiseStream.EXCLUDING, position).coin(
        config.xtc_probability
    )


def left_by_xtc(
    scores: NDArray[np.floating], tokens: NDArray[np.integer], threshold: float
) -> NDArray[np.int64]:
    """Indices of what XTC leaves: of the tokens that reach the threshold, only the least likely."""
    weights = np.exp(scores - scores.max(), dtype=np.float64)
    likely = np.flatnonzero(weights >= threshold * weights.sum())
    if len(likely) < 2:
        return np.arange(len(scores))
    last = likely[np.lexsort((tokens[likely], -scores[likely]))[-1]]
    return np.setdiff1d(np.arange(len(scores)), likely[likely != last], assume_unique=True)


def _largest(logits: FloatArray, count: int) -> NDArray[np.int64]:
    if count > _MANY:
        return np.argpartition(logits, -count)[-count:]
    tokens: NDArray[np.int64] = top(logits[None], count)[1][0].astype(np.int64)
    return tokens


def _top_p(logits: FloatArray, top_p: float) -> NDArray[np.int64]:
    """The smallest set of the likeliest entries whose probability reaches top_p, as indices."""
    best = logits.max()
    if len(logits) > 2 * _MANY:
        # In single precision, which takes a tenth of the time and nearly always says enough.
        roughly = top_p * np.exp(logits - best).sum(dtype=np.float64)
        order = _largest(logits, _MANY)
        sums = np.cumsum(np.exp(logits[order].astype(np.float64) - best))
        first, last = np.searchsorted(sums, (roughly * (1 - _ROUNDING), roughly * (1 + _ROUNDING)))
        if first == last < _MANY:
            return order[: first + 1]
    scores = logits.astype(np.float64)
    weights = np.exp(scores - best)
    wanted = top_p * weights.sum()
    near = np.flatnonzero(scores >= best - _NEAR)
    if weights[near].sum() < wanted:
        near = np.arange(len(scores))
    order = near[np.argsort(-scores[near], kind="stable")]
    return order[: int(np.searchsorted(np.cumsum(weights[order]), wanted)) + 1]
