"""Adjustments of logits before a choice: the bias of single tokens, then penalties for repetition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.tree import FloatArray

Tokens = NDArray[np.int64]


class Adjustments:
    """The bias and the penalties of one answer.

    Attributes:
        exist: whether any logit changes.
    """

    def __init__(self, config: GenerationConfig, n_vocab: int) -> None:
        bias = [(token, value) for token, value in config.logit_bias if 0 <= token < n_vocab]
        self._biased: Tokens = np.array([token for token, _ in bias], dtype=np.int64)
        self._bias = np.array([value for _, value in bias], dtype=np.float32)
        self._config = config
        self.exist = bool(bias) or config.penalizes
        self._counted: tuple[int, Tokens, NDArray[np.int64]] | None = None

    def adjust(self, logits: FloatArray, sequence: Sequence[int], path: Sequence[int] = ()) -> Original:
        """Change the logits of what follows a sequence and a path after it, in place.

        Args:
            logits: (n_vocab,); fewer if the vocabulary is cut.

        Returns:
            What restores them.
        """
        original = Original(logits)
        biased = self._biased < len(logits)
        tokens = self._biased[biased]
        original.keep(tokens)
        logits[tokens] += self._bias[biased]
        c = self._config
        if not c.penalizes:
            return original
        seen, counts = self._occurrences(sequence, path)
        inside = seen < len(logits)
        seen, counts = seen[inside], counts[inside]
        original.keep(seen)
        values = logits[seen]
        values = np.where(values > 0, values / c.repeat_penalty, values * c.repeat_penalty)
        logits[seen] = values - counts * c.frequency_penalty - c.presence_penalty
        return original

    def _occurrences(self, sequence: Sequence[int], path: Sequence[int]) -> tuple[Tokens, NDArray[np.int64]]:
        """The tokens that are penalized, and how often each occurs."""
        window = self._config.penalty_window
        if window:
            from_path = path[-window:]
            from_sequence = window - len(from_path)
            last = sequence[len(sequence) - min(from_sequence, len(sequence)) :]
            return _counted([*last, *from_path])
        # A whole conversation is counted once for all nodes of its tree.
        if self._counted is None or self._counted[0] != len(sequence):
            self._counted = (len(sequence), *_counted(sequence))
        _, seen, counts = self._counted
        if not path:
            return seen, counts
        tokens, more = _counted(path)
        both = np.union1d(seen, tokens)
        total = np.zeros(len(both), dtype=np.int64)
        total[np.searchsorted(both, seen)] += counts
        total[np.searchsorted(both, tokens)] += more
        return both, total


class Original:
    """Logits as they were before they were adjusted in place."""

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits
        self._kept: list[tuple[Tokens, FloatArray]] = []

    def keep(self, tokens: Tokens) -> None:
        """Keep the logits of these tokens as they are now."""
        self._kept.append((tokens, self._logits[tokens]))

    def restore(self) -> None:
        """Write what was kept back, the latest first."""
        for tokens, values in reversed(self._kept):
            self._logits[tokens] = values


def _counted(tokens: Sequence[int]) -> tuple[Tokens, NDArray[np.int64]]:
    return np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
