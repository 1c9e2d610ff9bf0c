"""The candidates of a drafter's last tree, kept until the target has decided how the sequence continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgespec.speculation.drafters.base import ProposedBy
from edgespec.speculation.evidence import OTHERS, CandidateSource
from edgespec.speculation.growth import AcceptanceModel, Children, Frontier
from edgespec.speculation.tree import TokenTree

_NAMES: Mapping[CandidateSource, ProposedBy] = {
    CandidateSource.TEXT: "text",
    CandidateSource.FILES: "files",
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
