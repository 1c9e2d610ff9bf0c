"""The logits after each node of a tree, from the one pass of a block head that predicts a block.

A DFlash head predicts every position by itself, so the logits after a node depend on its depth alone, and the
chance of a path is the product of its tokens' (DDTree, arXiv 2604.12989). In DFlash2 heads they depend on the
node's token, too.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edgespec.speculation.tree import FloatArray, IntArray


class BlockLogits(Protocol):
    """The logits after nodes of a tree."""

    def after(self, depth: int, tokens: IntArray) -> FloatArray:
        """(nodes, n_vocab) the logits after nodes, not to be changed.

        Args:
            depth: of the nodes; the root's is 0.
            tokens: (nodes,) theirs.
        """


class IndependentLogits(BlockLogits):
    """Each position by itself.

    Args:
        logits: (drafts, n_vocab) of the positions behind the root.
    """

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits

    def after(self, depth: int, tokens: IntArray) -> FloatArray:
        row = self._logits[depth]
        return np.broadcast_to(row, (len(tokens), len(row)))


class PairedLogits(BlockLogits):
    """A few candidates of each position, scored by the candidate before (DFlash2).

    Args:
        candidates: (drafts, candidates) token ids.
        scores: (drafts, candidates, candidates) of each candidate of the position before, those of this
            position's.
        n_vocab: tokens that are drafted.
    """

    def __init__(self, candidates: FloatArray, scores: FloatArray, n_vocab: int) -> None:
        self._candidates, self._scores = candidates.astype(np.int32), scores
        self._n_vocab = n_vocab

    def after(self, depth: int, tokens: IntArray) -> FloatArray:
        found = np.full((len(tokens), self._n_vocab), -np.inf, dtype=np.float32)
        # Tokens from other sources may be no candidates: then the average must do.
        scores = np.repeat(self._scores[depth].mean(axis=0)[None], len(tokens), axis=0)
        if depth:
            nodes, places = np.nonzero(tokens[:, None] == self._candidates[depth - 1])
            scores[nodes] = self._scores[depth, places]
        drafted = self._candidates[depth] < self._n_vocab
        found[:, self._candidates[depth][drafted]] = scores[:, drafted]
        return found
