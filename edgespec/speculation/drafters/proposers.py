"""Proposers: sources of candidates that need no model, merged into the frontier of a growing tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.speculation.growth import Children, Frontier


class Proposals(Protocol):
    """The proposals of one source at the end of one text, looked up as a tree grows there."""

    def join(self, frontier: Frontier, children: Children) -> Children:
        """The candidates of a draft step, joined by those that this source proposes for the same nodes.

        A node must come after its parent.
        """
        ...


class Proposer(Protocol):
    """A source of candidates. It is given the whole text every time, and finds out what is new in it."""

    name: str

    def propose(self, text: Sequence[int], depth: int) -> Proposals:
        """Proposals for what may follow the text.

        Args:
            depth: most tokens of a path that can be used.
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
    """The proposals of all these sources."""
    return JoinedProposals([proposer.propose(text, depth) for proposer in proposers])
