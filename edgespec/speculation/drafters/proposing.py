"""A drafter without a model: its trees grow from the candidates of proposers."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.speculation.drafters.base import Drafter, DraftRequest, ProposedBy
from edgespec.speculation.drafters.expansions import Expansions
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import JoinedProposals, Proposer, proposals_of
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.target_rows import observed
from edgespec.speculation.sources.text import TextSource
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.tree_search import TreeSearch, grow_together


class _ProposedTree:
    """One tree while it grows, and until the target has decided."""

    def __init__(self, request: DraftRequest, proposals: JoinedProposals) -> None:
        self._request = request
        self._sequence = list(request.sequence)
        self._proposals = proposals
        self._expansions = Expansions()

    def expand(self, frontier: Frontier) -> Children:
        children = self._proposals.join(frontier, Children.none(len(frontier.nodes), 0))
        children = self._request.ranking.filtered(frontier, children, len(self._sequence))
        self._expansions.add(frontier, children)
        return children

    def proposed_by(self, tree: TokenTree) -> list[ProposedBy]:
        return self._expansions.proposed_by(tree)

    def learn(self, sequence: Sequence[int]) -> None:
        if list(sequence[: len(self._sequence)]) == self._sequence:
            self._expansions.teach(self._request.limits.expansion.acceptance, sequence[len(self._sequence) :])
        self._expansions = Expansions()  # each counts as evidence once


class ProposingDrafter(Drafter):
    """Drafts trees from proposals alone."""

    steps = 0

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self.name = ", ".join(proposer.name for proposer in proposers)
        self._proposers = proposers
        self._last: list[_ProposedTree] = []

    def draft(self, sequence: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree of what may follow the sequence."""
        (tree,) = self.draft_together([DraftRequest(sequence, limits, ranking)], limits)
        return tree

    def draft_together(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[TokenTree]:
        """A tree for each of several sequences, from one search."""
        self._last = []
        if not limits.allows_drafting:
            return [TokenTree.root_only(request.sequence[-1]) for request in requests]
        self._last = [
            _ProposedTree(request, proposals_of(self._proposers, request.sequence, request.limits.depth))
            for request in requests
        ]

        def expand(frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
            return [self._last[index].expand(frontier) for index, frontier in frontiers]

        searches = [TreeSearch(request.sequence[-1], request.limits) for request in requests]
        return grow_together(searches, expand, limits)

    def proposed_by(self, tree: TokenTree, index: int = 0) -> list[ProposedBy]:
        """Return the proposer of each node of one of the last trees."""
        return self._last[index].proposed_by(tree) if index < len(self._last) else ["text"] * (len(tree) - 1)

    def observe(self, sequence: Sequence[int], tree: TokenTree, logits: FloatArray) -> None:
        observed(self._proposers, sequence, tree, logits)

    def forget_sequences(self) -> None:
        for proposer in self._proposers:
            proposer.forget()

    def learn(self, sequence: Sequence[int], index: int = 0) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        if index < len(self._last):
            self._last[index].learn(sequence)

    def close(self) -> None:
        """Free nothing."""


def lookup_drafter() -> ProposingDrafter:
    """Everything that needs neither a model nor files: the sequence, and what the target has said."""
    return ProposingDrafter([TextSource(), RecycledSource()])
