"""A drafter without a model: its trees grow from the candidates of proposers."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.speculation.drafters.base import DraftRequest, ProposedBy
from edgespec.speculation.drafters.candidates import TreeCandidates
from edgespec.speculation.drafters.merging import MergingDrafter
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.text import TextSource
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.tree_search import TreeSearch, grow_together


class ProposingDrafter(MergingDrafter):
    """Drafts trees from proposals alone."""

    steps = 0

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        super().__init__(proposers)
        self._last: list[TreeCandidates] = []

    def draft_together(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[TokenTree]:
        """A tree for each of several sequences, from one search."""
        self._last = []
        if not limits.allows_drafting:
            return [TokenTree.root_only(request.sequence[-1]) for request in requests]
        self._last = [
            TreeCandidates(
                request.sequence,
                request.limits,
                request.ranking,
                request.all_proposals(self._proposers),
            )
            for request in requests
        ]

        def expand(frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
            return [
                self._last[index].joined(frontier, Children.none(len(frontier.nodes), 0))
                for index, frontier in frontiers
            ]

        searches = [TreeSearch(request.sequence[-1], request.limits) for request in requests]
        return grow_together(searches, expand, limits)

    def proposed_by(self, tree: TokenTree, index: int = 0) -> list[ProposedBy]:
        """Return the proposer of each node of one of the last trees."""
        return self._last[index].proposed_by(tree) if index < len(self._last) else ["text"] * (len(tree) - 1)

    def learn(self, sequence: Sequence[int], index: int = 0) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        if index < len(self._last):
            self._last[index].learn(sequence)

    def close(self) -> None:
        """Free nothing."""


def lookup_drafter() -> ProposingDrafter:
    """Everything that needs neither a model nor files: the sequence, and what the target has said."""
    return ProposingDrafter([TextSource(), RecycledSource()])
