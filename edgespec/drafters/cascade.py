"""Chains for the drafter to verify: what sources are sure of is read before the drafter has proposed it.

A drafter takes a step for every level of a tree. Where a text repeats itself, sources without a model know
the next tokens, and the drafter will most likely agree. So a step also reads these, each below the one before
it: the drafter verifies them in one decode, and those that the search comes upon later take no step of their
own (the vertical cascade of CS Drafting, Chen et al. 2023; staged speculation, Spector and Re 2023). The tree
is the one that would have grown anyway.

A node read ahead costs a row, and saves a step if the search comes upon it. Both have measured costs, and how
often the search comes upon such nodes is counted. Where a row takes a good part of a step, as with small
drafters, nothing was gained (docs/benchmarks.md), so it is done where rows are cheap.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import JoinedProposals
from edgespec.speculation.tree import FloatArray, IntArray

_CHEAP = 0.2  # cost of a row over that of a step, up to which nodes are read ahead
_USUAL_SHARE = 0.5  # cost of a row over that of a step, where neither was measured
_LEAST_CHANCE = 0.3  # rows are never so cheap that guesses that are mostly wrong would pay
_PRIOR = 4.0  # nodes that are believed to have been promised, and come upon
_FADE = 0.98  # weight of the past, per step


class Cascade:
    """Proposes nodes to be read ahead, below those that a draft step reads, for one text."""

    def __init__(self) -> None:
        self._promised = self._came = 0.0  # nodes read ahead: how many were expected to be of use, and were
        self._next = -1

    def came_upon(self, nodes: int) -> None:
        """The search has come upon so many nodes that were read ahead."""
        self._came += nodes

    def chains(
        self,
        frontier: Frontier,
        proposals: JoinedProposals,
        limits: TreeLimits,
        ranking: Ranking,
        start: int,
        room: int,
    ) -> Frontier:
        """The nodes to read beside a frontier's, each after its parent. Their numbers are below 0.

        Args:
            start: the position of a child of the tree's root.
            room: most nodes.
        """
        self._promised, self._came = _FADE * self._promised, _FADE * self._came
        trust = min((self._came + _PRIOR) / (self._promised + _PRIOR), 1.0)
        least = max(_row_over_step(limits), _LEAST_CHANCE) / trust
        found: list[Frontier] = []
        level, chances = frontier, np.ones(len(frontier.nodes))
        while room and least < 1 and len(level.nodes):
            level, chances = self._below(level, chances, proposals, limits, ranking, start)
            sure = np.argsort(-chances, kind="stable")[:room]
            sure = sure[chances[sure] >= least]
            level, chances = level.part(sure), chances[sure]
            self._promised += float(chances.sum())
            room -= len(sure)
            found.append(level)
        return joined([frontier.part([]), *found])

    def _below(
        self,
        level: Frontier,
        chances: NDArray[np.float64],
        proposals: JoinedProposals,
        limits: TreeLimits,
        ranking: Ranking,
        start: int,
    ) -> tuple[Frontier, NDArray[np.float64]]:
        """The best candidate of each node, as far as it may be expanded, and the chance of the way there."""
        children = proposals.join(level, Children.none(len(level.nodes), 0))
        if not children.tokens.shape[1]:
            return level.part([]), np.empty(0)
        children = ranking.filtered(level, children, start)
        edges: FloatArray = np.minimum(limits.growth.chances.edges(children), 0)
        best = edges.argmax(axis=1)
        rows = np.arange(len(best))
        tokens: IntArray = children.tokens[rows, best]
        chances = chances * np.exp(edges[rows, best].astype(np.float64))
        goes_on = level.depths + 1 < limits.depth
        if limits.ends is not None:
            goes_on &= ~limits.ends(tokens)
        numbers = np.arange(self._next, self._next - len(best), -1, dtype=np.int32)
        self._next -= len(best)
        below = Frontier(numbers, tokens, level.nodes, level.depths + np.int32(1))
        return below, np.where(goes_on, chances, 0.0)


def rows_are_cheap(limits: TreeLimits) -> bool:
    """True if a further row of a draft step takes so little that nodes should be read ahead."""
    return _row_over_step(limits) <= _CHEAP


def joined(parts: list[Frontier]) -> Frontier:
    """The nodes of several frontiers."""
    return Frontier(
        np.concatenate([part.nodes for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.parents for part in parts]),
        np.concatenate([part.depths for part in parts]),
    )


def _row_over_step(limits: TreeLimits) -> float:
    """A further row of a draft step over the step, by cost; the usual share where cost is not to decide."""
    if limits.min_gain <= 0 or limits.cascade:
        return _USUAL_SHARE
    return limits.row_gain / limits.min_gain
