"""The candidates of one tree, while it grows and until the target has decided how the text continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgespec.speculation.drafters.base import ProposedBy
from edgespec.speculation.evidence import OTHERS, CandidateSource
from edgespec.speculation.growth import AcceptanceModel, Children, Frontier, TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import JoinedProposals
from edgespec.speculation.tree import FloatArray, TokenTree

_NAMES: Mapping[CandidateSource, ProposedBy] = {
    CandidateSource.TEXT: "text",
    CandidateSource.FILES: "files",
    CandidateSource.ANSWERS: "answers",
    CandidateSource.RECYCLED: "recycled",
}


class Expansions:
    """The candidates of every node that was expanded."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Children, int, int]] = {}
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, frontier: Frontier, children: Children) -> None:
        """Add a draft step."""
        steps = zip(frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        for row, (node, parent, token) in enumerate(steps):
            self._rows[node] = children, row, token
            self._nodes[parent, token] = node

    def proposed_by(self, tree: TokenTree) -> list[ProposedBy]:
        """Return the proposer of each node below the root; the model, if these are other candidates."""
        numbers: list[int | None] = [0]  # of the tree's nodes, as they were found
        sources: list[ProposedBy] = []
        for parent, token in zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True):
            above = numbers[parent]
            found = self._rows.get(above) if above is not None else None
            sources.append(_source(*found[:2], token) if found is not None else "model")
            numbers.append(None if above is None else self._nodes.get((above, token)))
        return sources

    def teach(self, chances: AcceptanceModel, went_on: Sequence[int]) -> None:
        """Teach the policy which candidates the target chose.

        Args:
            went_on: the tokens that followed the root.
        """
        node: int | None = 0
        for token in went_on:
            if node is None or node not in self._rows:
                break
            children, row, after = self._rows[node]
            chances.learn(children.row(row), after, token)
            node = self._nodes.get((node, token))


def _source(children: Children, row: int, token: int) -> ProposedBy:
    """Return the proposer of a candidate in a row."""
    if children.forced is not None and children.forced[row] == token:
        return "grammar"
    (columns,) = np.nonzero(children.tokens[row] == token)
    by_model = bool((children.logprobs[row, columns] > -np.inf).any())
    if children.evidence is None:
        return "model"
    found = (children.evidence[row, columns] > OTHERS).any(axis=0)
    others: list[ProposedBy] = [name for source, name in _NAMES.items() if found[source]]
    if by_model:
        return "both" if others else "model"
    return others[0] if others else "model"


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
