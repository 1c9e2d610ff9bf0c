"""Tree growth: what a tree policy, a drafter and the limits of a pass tell the search for the best tree.

A tree policy assigns every edge a log-probability, so a path's score never rises on the way down, and the
best nodes within a budget form a tree. `tree_search` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.evidence import OTHERS, EvidenceArray, alone_logits
from edgespec.speculation.tree import MAX_LEAVES, FloatArray, IntArray


@dataclass(frozen=True)
class Frontier:
    """Nodes to expand in one draft step, numbered in the order in which they were found.

    Attributes:
        nodes, tokens, parents, depths: (width,) each.
    """

    nodes: IntArray
    tokens: IntArray
    parents: IntArray
    depths: IntArray

    def part(self, rows: Sequence[int] | NDArray[np.intp]) -> Frontier:
        """Return some of the nodes."""
        which = np.asarray(rows, dtype=np.intp)
        return Frontier(self.nodes[which], self.tokens[which], self.parents[which], self.depths[which])

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each node with its parent, its token and its depth."""
        columns = (self.nodes, self.parents, self.tokens, self.depths)
        return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True)
class Children:
    """Candidate children of the nodes of a frontier, the drafter's best first."""

    tokens: IntArray  # (width, branching) token ids
    logprobs: FloatArray  # (width, branching) log-probability of each given its parent; -inf for none
    # (width, branching, sources) what each source without a model says for each candidate; see `evidence`.
    # None if no source was asked.
    evidence: EvidenceArray | None = None
    # (width, branching) the noise that the target adds to each candidate's log-probability, in which the
    # drafter's log-probability already has its part. None if it adds none, or nobody asked.
    noise: FloatArray | None = None
    # (width,) the candidate of each node that spells the only text which a grammar permits there; -1 for
    # none. None if there is none anywhere.
    forced: IntArray | None = None

    @classmethod
    def none(cls, width: int, branching: int = 1) -> Children:
        shape = (width, branching)
        return cls(np.zeros(shape, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32))

    def row(self, row: int) -> Children:
        """The candidates of one node of the frontier."""
        return self._part(slice(row, row + 1), slice(None))

    def first(self, count: int) -> Children:
        """The best `count` candidates of each node."""
        return self._part(slice(None), slice(count))

    def _part(self, rows: slice, columns: slice) -> Children:
        return Children(
            self.tokens[rows, columns],
            self.logprobs[rows, columns],
            None if self.evidence is None else self.evidence[rows, columns],
            None if self.noise is None else self.noise[rows, columns],
            None if self.forced is None else self.forced[rows],
        )

    @property
    def proposed(self) -> NDArray[np.bool_]:
        """(width, branching) whether there is a candidate."""
        listed = self.logprobs > -np.inf
        return listed if self.evidence is None else listed | (self.evidence > OTHERS).any(axis=-1)


class AcceptanceModel(Protocol):
    """The acceptance probability of a candidate, given that its parent was accepted."""

    def logprobs(self, children: Children) -> FloatArray:
        """(width, branching) log-probabilities, at most 0; -inf leaves a candidate out."""

    def learn(self, children: Children, after: int, token: int) -> None:
        """Learn from the target's choice.

        Args:
            children: the candidates of one node.
            after: the node's token.
            token: the token that the target chose, whether it was a candidate or not.
        """

    def flush(self) -> None:
        """Put what was learned into the store, if anything was."""
        return


# A source's candidate that the drafter was asked about and did not list is this much less likely.
_DOUBTED = np.float32(np.log(0.06))


class DrafterProbability(AcceptanceModel):
    """The drafter's own probability, taken as it is, and rough values for what only other sources propose."""

    def logprobs(self, children: Children) -> FloatArray:
        logprobs = np.minimum(children.logprobs, 0)
        if children.evidence is not None:
            listed = np.isfinite(children.logprobs)
            alone = -np.log1p(np.exp(-alone_logits(children.evidence).max(axis=-1)))
            alone += np.where(listed.any(axis=1, keepdims=True), _DOUBTED, np.float32(0))
            logprobs = np.where(listed, logprobs, alone)
        return logprobs

    def learn(self, children: Children, after: int, token: int) -> None:
        pass


@dataclass(frozen=True)
class ExpansionPolicy:
    """The part of a tree policy that the search needs."""

    # the acceptance probabilities that scores are made of
    acceptance: AcceptanceModel = field(default_factory=DrafterProbability)
    by_level: bool = False  # expand only nodes of the newest level, instead of the best anywhere
    # stop after a draft step that raised the tree's expected accepted tokens by no more
    least_gain: float = 0.0
    # most children of a node below the root, if that is fewer than the root may have
    later_branching: int | None = None
    merges: bool = True  # whether a model drafter may merge in what other sources propose
    # whether tokens that end the answer become nodes. Where the target chooses, such a node wastes a row: the
    # choice after its parent already decides. Rules that judge drafted tokens need it. Nothing ever grows
    # below one.
    keeps_ends: bool = False


@dataclass(frozen=True)
class TreeLimits:
    """Limits of a tree, and how it grows."""

    budget: int  # most nodes, the root included
    depth: int = 16  # most edges from the root
    leaves: int = MAX_LEAVES  # most leaves
    width: int = 8  # most nodes expanded in one draft step
    branching: int = 8  # most children of a node
    min_logprob: float = -np.inf  # drafted nodes are worth their cost only if their path scores above this
    free_nodes: int = 1  # nodes, the root included, that cost nothing, whatever their score
    # a pass is padded to a multiple of this. The last nodes of a tree must together be worth that many rows,
    # and the next best nodes fill the padding.
    row_multiple: int = 1
    min_gain: float = 0.0  # expected accepted tokens that make a draft step worth its cost
    row_gain: float = 0.0  # the same for every node that a step reads
    # what the first draft steps may cost, in the same unit, before they must pay: the disk reads ahead for
    # the pass meanwhile, so that they take no time.
    overlap_budget: float = 0.0
    # what all draft steps may cost beyond that, in the same unit; the first is always taken
    loss_budget: float = np.inf
    trust: float = 1.0  # tokens that are accepted for each one that trees promise
    steps: int = 1 << 16  # most draft steps
    # the tree policy, as far as the search needs it
    expansion: ExpansionPolicy = field(default_factory=ExpansionPolicy, compare=False)
    # (tokens) -> whether each ends an answer; None if no token does. No sequence continues after one.
    is_end: Callable[[IntArray], NDArray[np.bool_]] | None = field(default=None, compare=False)

    @property
    def allows_drafting(self) -> bool:
        """True if the tree may be more than its root."""
        return self.budget > 1 and self.depth > 0


def usual_limits(nodes: int) -> TreeLimits:
    """The limits of a tree of so many nodes, where neither its policy nor a person sets others."""
    return TreeLimits(nodes, depth=nodes, width=max(8, nodes // 8))
