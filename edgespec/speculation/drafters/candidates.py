"""The candidates of one tree, while it grows and until the target has decided how the text continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.speculation.drafters.base import ProposedBy
from edgespec.speculation.drafters.expansions import Expansions
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import JoinedProposals
from edgespec.speculation.tree import FloatArray, TokenTree


class TreeCandidates:
    """The candidates of one tree's nodes.

    Args:
        text: the sequence in the target's tokens; the root is its last one.
        limits, ranking: of the tree; None if tokens are drawn instead.
        proposals: of sources, which join the candidates; None if there are none.

    Attributes:
        text, ranking: as given.
    """

    def __init__(
        self,
        text: Sequence[int],
        limits: TreeLimits | None = None,
        ranking: Ranking | None = None,
        proposals: JoinedProposals | None = None,
    ) -> None:
        self.text = list(text)
        self._limits = limits
        self.ranking = ranking
        self._proposals = proposals
        self._expansions = Expansions()

    @property
    def branching(self) -> int:
        """Candidates of each node."""
        assert self._limits is not None, "tokens are drawn"
        return self._limits.branching

    def ranked(self, frontier: Frontier, rows: Sequence[int], logits: FloatArray) -> Children:
        """The best candidates after nodes, by the drafter's logits.

        To be called for every frontier, even if no candidates are ranked.

        Args:
            rows: indices of these nodes in the frontier.
            logits: (rows, n_vocab) after each of them.
        """
        assert self.ranking is not None, "tokens are drawn"
        self.ranking.before_ranking(frontier, rows)
        if not rows:
            return Children.none(0, self.branching)
        nodes = frontier.part(rows)
        positions = [len(self.text) + depth for depth in nodes.depths.tolist()]
        return self.ranking.best(logits, positions, self.branching, nodes.tokens)

    def joined(self, frontier: Frontier, children: Children) -> Children:
        """A drafter's candidates, joined by those of the sources; kept until the target has decided."""
        if self._proposals is not None:
            assert self.ranking is not None, "tokens are drawn"
            children = self._proposals.join(frontier, children)
            children = self.ranking.filtered(frontier, children, len(self.text))
        self._expansions.add(frontier, children)
        return children

    def proposed_by(self, tree: TokenTree) -> list[ProposedBy]:
        """Return the proposer of each node of the tree."""
        return self._expansions.proposed_by(tree)

    def learn(
        self, sequence: Sequence[int], split: Callable[[Sequence[int]], Sequence[int]] | None = None
    ) -> None:
        """Teach the policy which candidates the target chose; each counts as evidence once.

        Args:
            sequence: the text, followed by what the target chose.
            split: that into the tokens of the tree, if these are other ones.
        """
        end = len(self.text)
        if self._limits is not None and list(sequence[:end]) == self.text:
            went_on = sequence[end:]
            if split is not None:
                went_on = split(went_on)
            self._expansions.teach(self._limits.expansion.acceptance, went_on)
        self._expansions = Expansions()
