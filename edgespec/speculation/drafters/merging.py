"""Common parts of drafters whose trees merge the candidates of sources without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.speculation.drafters.base import Drafter, DraftRequest
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import KEPT_OF_ROWS, Proposer, TargetRows
from edgespec.speculation.top import top
from edgespec.speculation.tree import FloatArray, TokenTree


class MergingDrafter(Drafter):
    """A drafter that follows several sequences at once, and merges candidates of sources into their trees.

    Args:
        proposers: the sources.
        model: that drafts besides, for people; None if none does.
        n_vocab: tokens that the drafter knows; None for all of the target's.
    """

    def __init__(
        self, proposers: Sequence[Proposer], model: str | None = None, n_vocab: int | None = None
    ) -> None:
        names = [] if model is None else [model]
        self.name = ", ".join([*names, *(proposer.name for proposer in proposers)])
        self._proposers = proposers
        self._known_tokens = slice(n_vocab)

    def draft(self, sequence: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree of at most `limits.budget` nodes below the last token of the sequence.

        Raises:
            DecodeAborted: stopped from outside; the next call continues from what was read.
        """
        (tree,) = self.draft_together([DraftRequest(sequence, limits, ranking)], limits)
        return tree

    def observe(self, sequence: Sequence[int], tree: TokenTree, logits: FloatArray) -> None:
        observed(self._proposers, sequence, tree, logits[:, self._known_tokens])

    def forget_sequences(self) -> None:
        for proposer in self._proposers:
            proposer.forget()


_MAX_ROWS = 64  # of a pass: more would take a share of it that shows


def observed(
    proposers: Sequence[Proposer], sequence: Sequence[int], tree: TokenTree, logits: FloatArray
) -> None:
    """Show a pass to the sources that keep something of passes.

    Args:
        sequence: the sequence that the pass extended; the tree's root is its last token.
        logits: (nodes, n_vocab) the target's; they are read only.
    """
    keeping = [proposer for proposer in proposers if proposer.keeps_passes]
    if keeping:
        rows = target_rows(tree, logits)
        for proposer in keeping:
            proposer.observe(sequence, tree, rows)


def target_rows(tree: TokenTree, logits: FloatArray) -> TargetRows:
    """The best of the logits at the likeliest nodes of a tree, the root first."""
    nodes = np.arange(len(tree), dtype=np.int32)
    if len(nodes) > _MAX_ROWS:
        nodes = np.argsort(-tree.logprobs, kind="stable")[:_MAX_ROWS].astype(np.int32)
    values, tokens = top(logits if len(nodes) == len(logits) else logits[nodes], KEPT_OF_ROWS)
    with np.errstate(invalid="ignore"):  # rows that are not finite are of no use, and no error of this part
        chances = np.exp(values - values[:, :1])
        chances /= chances.sum(axis=1, keepdims=True)
    return TargetRows(nodes, tokens, chances)
