"""Adjustments of logits before a choice: the bias of tokens, penalties for repetition, banned strings, and a
least number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.banned import BannedStrings
from edgespec.speculation.repetition import RepetitionPenalty
from edgespec.speculation.spelling import Spelling, Tokens
from edgespec.speculation.tree import FloatArray


class Adjustments:
    """The bias, the penalties, the banned strings and the least tokens of one answer.

    Args:
        spelling: of the vocabulary, for banned strings, sequence breakers and least tokens.
        start: where the answer begins in the sequence.

    Attributes:
        exist: whether any logit changes.
    """

    def __init__(
        self, config: GenerationConfig, n_vocab: int, spelling: Spelling | None = None, start: int = 0
    ) -> None:
        bias = [(token, value) for token, value in config.logit_bias if 0 <= token < n_vocab]
        self._biased: Tokens = np.array([token for token, _ in bias], dtype=np.int64)
        self._bias = np.array([value for _, value in bias], dtype=np.float32)
        self._config = config
        self._repetition: RepetitionPenalty | None = None
        if config.penalizes_repetitions:
            self._repetition = RepetitionPenalty(config, spelling)
        self._banned: BannedStrings | None = None
        if config.banned_strings:
            assert spelling is not None, "strings cannot be banned without the texts of tokens"
            self._banned = BannedStrings(config.banned_strings, spelling, start)
        self._may_end = start + config.min_tokens
        self._ends: Tokens = np.empty(0, dtype=np.int64)
        if config.min_tokens:
            assert spelling is not None, "the tokens that end an answer are unknown"
            self._ends = np.union1d(spelling.end_tokens, [t for t in config.stop_tokens if 0 <= t < n_vocab])
        self.exist = bool(bias or config.penalizes or config.banned_strings or config.min_tokens)
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
        if c.penalizes_tokens:
            seen, counts = self._occurrences(sequence, path)
            inside = seen < len(logits)
            seen, counts = seen[inside], counts[inside]
            original.keep(seen)
            values = logits[seen]
            values = np.where(values > 0, values / c.repeat_penalty, values * c.repeat_penalty)
            logits[seen] = values - counts * c.frequency_penalty - c.presence_penalty
        if self._repetition is not None:
            tokens, penalties = self._repetition.penalties(sequence, path)
            inside = tokens < len(logits)
            original.keep(tokens[inside])
            logits[tokens[inside]] -= penalties[inside]
        if self._banned is not None:
            refused = self._banned.refused(sequence, path)
            refused = refused[refused < len(logits)]
            original.keep(refused)
            logits[refused] = -np.inf
        if len(sequence) + len(path) < self._may_end:
            ends = self._ends[self._ends < len(logits)].astype(np.int64)
            original.keep(ends)
            logits[ends] = -np.inf
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
