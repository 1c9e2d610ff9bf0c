"""The tokens whose logits a drafter computes, where its vocabulary is large.

The output head is a third of a small drafter's step, because it has a row for every token of the vocabulary.
Nearly all text consists of few of them. So only the logits of frequent tokens are computed, and of those that
a text holds (FR-Spec, Zhao et al. 2025, section 3, ranks tokens by their frequency in a corpus; here the
order of the vocabulary and the texts themselves say which are frequent). The target checks every token, so
the text is the same; a token that is missing from the list ends a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_VOCABULARY = 1 << 16
"""Tokens from which on a vocabulary is worth a shortlist."""

_FREQUENT = 1 / 4  # of the vocabulary; its tokens are listed in about the order of their frequency
_MAX_ADDED = 1 / 8  # of the vocabulary, until texts must add their tokens again
_MEMORY = 0.98  # weight of the past in the share of rounds that end in a missing token
_TOO_MANY = 0.1  # a share of such rounds that costs more than the list gains
_FEW = 0.05  # a share from which on it gains again


class HeadShortlist:
    """The frequent tokens of a vocabulary and those of the texts, unless texts keep leaving the list.

    Texts in other scripts than the vocabulary was mostly trained on do.
    """

    def __init__(self, n_vocab: int) -> None:
        self._listed = np.zeros(n_vocab, dtype=np.bool_)
        self._in_force = True
        self._missing = 0.0  # running share of rounds
        self._list_frequent()

    @property
    def listed(self) -> NDArray[np.bool_] | None:
        """(n_vocab,) whether each token is in the list; None if all are to be computed."""
        return self._listed if self._in_force else None

    def note(self, tokens: Sequence[int], *, chosen: bool) -> bool:
        """Add tokens of a text.

        Args:
            chosen: the target chose these in the last round; otherwise they are part of a prompt.

        Returns:
            True if `listed` is another list now.
        """
        given = np.asarray(tokens, dtype=np.int64)
        new = given[~self._listed[given]]
        if chosen:
            self._missing = _MEMORY * self._missing + (1 - _MEMORY) * bool(len(new))
        self._added += len(new)
        if self._added > _MAX_ADDED * len(self._listed):
            self._list_frequent()
            new = given
        self._listed[new] = True
        was_in_force = self._in_force
        self._in_force = self._missing < (_TOO_MANY if was_in_force else _FEW)
        return self._in_force != was_in_force or (self._in_force and bool(len(new)))

    def _list_frequent(self) -> None:
        self._listed[:] = False
        self._listed[: int(_FREQUENT * len(self._listed))] = True
        self._added = 0
