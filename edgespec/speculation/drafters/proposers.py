"""Sources of drafted tokens that need no model: each adds candidates to the frontier of a growing tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.speculation.growth import Children, Frontier


class Proposals(Protocol):
    """What one source proposes below the end of one text, asked for as a tree grows there."""

    def join(self, frontier: Frontier, children: Children) -> Children:
        """The candidates of a draft step, and those that this source proposes for the same nodes.

        Nodes must be asked about after their parents.
        """
        ...


class Proposer(Protocol):
    """A source of candidates: it is given the whole text every time, and finds out what is new in it."""

    name: str

    def propose(self, text: Sequence[int], depth: int) -> Proposals:
        """What may follow the text.

        Args:
            depth: tokens that are of use at most.
        """
        ...


class JoinedProposals(Proposals):
    """The proposals of several sources."""

    def __init__(self, parts: Sequence[Proposals]) -> None:
        self._parts = parts

    def join(self, frontier: Frontier, children: Children) -> Children:
        for part in self._parts:
            children = part.join(frontier, children)
        return children


def proposals_of(proposers: Sequence[Proposer], text: Sequence[int], depth: int) -> Proposals:
    """What all of them propose."""
    return JoinedProposals([proposer.propose(text, depth) for proposer in proposers])
