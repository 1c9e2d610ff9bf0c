"""A drafter without a model: its trees grow from the candidates of proposers."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.speculation.drafters.base import Drafter, Source
from edgespec.speculation.drafters.expansions import Expansions
from edgespec.speculation.drafters.lookup import PromptLookup
from edgespec.speculation.drafters.proposers import Proposer, proposals_of
from edgespec.speculation.growth import Children, Frontier, TreeLimits, grow
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import TokenTree


class ProposingDrafter(Drafter):
    """Drafts trees from proposals alone."""

    steps = 0

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self.name = " and ".join(proposer.name for proposer in proposers)
        self._proposers = proposers
        self._text: list[int] = []
        self._last = Expansions()
        self._limits: TreeLimits | None = None

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree of what may follow the text."""
        self._last, self._limits = Expansions(), limits
        if not limits.allows_drafting:
            return TokenTree.root_only(text[-1])
        self._text = list(text)
        proposals = proposals_of(self._proposers, text, limits.depth)

        def expand(frontier: Frontier) -> Children:
            children = proposals.join(frontier, Children.none(len(frontier.nodes), 0))
            children = ranking.filtered(frontier, children)
            self._last.add(frontier, children)
            return children

        return grow(text[-1], expand, limits)

    def sources(self, tree: TokenTree) -> list[Source]:
        """Who proposed each node of the last tree."""
        return self._last.sources(tree)

    def learn(self, text: Sequence[int]) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        if self._limits is not None and list(text[: len(self._text)]) == self._text:
            self._last.teach(self._limits.growth.chances, text[len(self._text) :])
        self._last = Expansions()  # each counts as evidence once

    def close(self) -> None:
        """There is nothing to free."""


def lookup_drafter() -> ProposingDrafter:
    """Prompt lookup alone."""
    return ProposingDrafter([PromptLookup()])
