"""What drafters have in common whose trees merge the candidates of sources without a model."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.speculation.drafters.base import Drafter, DraftRequest
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.sources.target_rows import observed
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
