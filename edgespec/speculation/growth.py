"""Tree growth: one batched best-first search that serves every tree policy.

A tree policy assigns every edge a log-probability, so a path's score never rises on the way down, and the
best nodes within a budget form a tree. The search finds them: it expands the best open nodes in batches,
until no child could be among the best or another draft step would not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.evidence import OTHERS, EvidenceArray, alone_logits
from edgespec.speculation.tree import MAX_LEAVES, FloatArray, IntArray, TokenTree


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


@dataclass(frozen=True)
class Children:
    """Candidate children of the nodes of a frontier, the drafter's best first.

    Attributes:
        tokens: (width, branching) token ids.
        logprobs: (width, branching) log-probability of each given its parent; -inf for none.
        evidence: (width, branching, sources) what each source without a model says for each candidate; see
            `evidence`. None if no source was asked.
        noise: (width, branching) the noise that the target adds to each candidate's log-probability, in which
            the drafter's log-probability already has its part. None if it adds none, or nobody asked.
    """

    tokens: IntArray
    logprobs: FloatArray
    evidence: EvidenceArray | None = None
    noise: FloatArray | None = None

    @classmethod
    def none(cls, width: int, branching: int = 1) -> Children:
        """No candidates."""
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
        )

    @property
    def proposed(self) -> NDArray[np.bool_]:
        """(width, branching) whether there is a candidate."""
        listed = self.logprobs > -np.inf
        return listed if self.evidence is None else listed | (self.evidence > OTHERS).any(axis=-1)


class Chances(Protocol):
    """The acceptance probability of a candidate, given that its parent was accepted."""

    def edges(self, children: Children) -> FloatArray:
        """(width, branching) log-probabilities, at most 0; -inf leaves a candidate out."""

    def learn(self, children: Children, after: int, token: int) -> None:
        """Learn from the target's choice.

        Args:
            children: the candidates of one node.
            after: the node's token.
            token: the token that the target chose, whether it was a candidate or not.
        """

    def keep(self) -> None:
        """Save what was learned for the next run, if anything was."""


# A source's candidate that the drafter was asked about and did not list is this much less likely.
_DOUBTED = np.float32(np.log(0.06))


class DrafterProbability(Chances):
    """The drafter's own probability, taken as it is, and rough values for what only other sources propose."""

    def edges(self, children: Children) -> FloatArray:
        edges = np.minimum(children.logprobs, 0)
        if children.evidence is not None:
            listed = np.isfinite(children.logprobs)
            alone = -np.log1p(np.exp(-alone_logits(children.evidence).max(axis=-1)))
            alone += np.where(listed.any(axis=1, keepdims=True), _DOUBTED, np.float32(0))
            edges = np.where(listed, edges, alone)
        return edges

    def learn(self, children: Children, after: int, token: int) -> None:
        pass

    def keep(self) -> None:
        pass


@dataclass(frozen=True)
class Growth:
    """The part of a tree policy that the search needs.

    Attributes:
        chances: the acceptance probabilities that scores are made of.
        by_level: expand only nodes of the newest level, instead of the best anywhere.
        least_gain: stop after a draft step that raised the tree's expected accepted tokens by no more.
        later_branching: most children of a node below the root, if that is fewer than the root may have.
        merges: whether a model drafter may merge in what other sources propose.
        ends: whether tokens that end the answer become nodes. Where the target chooses, such a node wastes a
            row: the choice after its parent already decides. Rules that judge drafted tokens need it.
            Nothing ever grows below one.
    """

    chances: Chances = field(default_factory=DrafterProbability)
    by_level: bool = False
    least_gain: float = 0.0
    later_branching: int | None = None
    merges: bool = True
    ends: bool = False


@dataclass(frozen=True)
class TreeLimits:
    """Limits of a tree, and how it grows.

    Attributes:
        budget: most nodes, the root included.
        depth: most edges from the root.
        leaves: most leaves.
        width: most nodes expanded in one draft step.
        branching: most children of a node.
        min_logprob: drafted nodes are worth their cost only if their path scores above this.
        free: nodes, the root included, that cost nothing, whatever their score.
        rows: a pass is padded to a multiple of this. The last nodes of a tree must together be worth that
            many rows, and the next best nodes fill the padding.
        min_gain: expected accepted tokens that make a draft step worth its cost.
        row_gain: the same for every node that a step reads.
        steps: most draft steps.
        growth: the tree policy.
        ends: (tokens) -> whether each ends an answer; None if no token does. No text continues after one.
    """

    budget: int
    depth: int = 16
    leaves: int = MAX_LEAVES
    width: int = 8
    branching: int = 8
    min_logprob: float = -np.inf
    free: int = 1
    rows: int = 1
    min_gain: float = 0.0
    row_gain: float = 0.0
    steps: int = 1 << 16
    growth: Growth = field(default_factory=Growth, compare=False)
    ends: Callable[[IntArray], NDArray[np.bool_]] | None = field(default=None, compare=False)

    @property
    def allows_drafting(self) -> bool:
        """Whether the tree may be more than its root."""
        return self.budget > 1 and self.depth > 0


def grow(root: int, expand: Callable[[Frontier], Children], limits: TreeLimits) -> TokenTree:
    """The `budget` best nodes by path score, found in as few draft steps as the policy allows.

    Args:
        root: the last token of the text.
        expand: one draft step.
    """
    search = tree_search(root, limits)
    frontier = next(search)
    while isinstance(frontier, Frontier):
        frontier = search.send(expand(frontier))
    return frontier


def tree_search(root: int, limits: TreeLimits) -> Generator[Frontier | TokenTree, Children | None]:
    """The search as a generator, for callers that answer draft steps in their own time.

    A batched best-first search (SpecExec, Svirschevski et al. 2024, section 4). A child never scores above
    its parent, so it is safe not to expand a node that could not put a child among the best. And the expected
    accepted tokens that a step can add are at most the sum of the probabilities of the nodes it expands.

    Yields:
        Frontiers, each to be answered with its candidates, and finally the tree.
    """
    growth = limits.growth
    tokens = np.array([root], dtype=np.int32)
    parents = np.array([-1], dtype=np.int32)
    depths = np.zeros(1, dtype=np.int32)
    scores = np.zeros(1, dtype=np.float32)
    is_open = np.ones(1, dtype=np.bool_)
    expected = 1.0
    for step in range(limits.steps):
        enters = _bar(scores, limits.budget)
        bar = max(enters, min(limits.min_logprob, _bar(scores, limits.free)))
        eligible = is_open & (depths < limits.depth) & (scores > bar)
        if growth.by_level:
            eligible &= depths == step
        chosen = _best_open(scores, eligible, limits.width)
        gains = np.exp(scores[chosen]) - limits.row_gain
        if step and limits.row_gain:  # without the root's candidates there is no draft
            chosen, gains = chosen[gains > 0], gains[gains > 0]
        if not len(chosen) or gains.sum() <= limits.min_gain:
            break
        children = yield Frontier(chosen, tokens[chosen], parents[chosen], depths[chosen])
        assert children is not None, "every draft step is answered"
        is_open[chosen] = False
        edges = np.minimum(growth.chances.edges(children), 0)
        if step and growth.later_branching is not None:
            edges[:, growth.later_branching :] = -np.inf
        ends = limits.ends(children.tokens) if limits.ends is not None else np.zeros(edges.shape, np.bool_)
        if not growth.ends:
            edges[ends] = -np.inf
        found = (scores[chosen, None] + edges).ravel()
        keep = found > (enters if limits.rows > 1 else bar)  # may fill padding
        tokens = np.concatenate([tokens, children.tokens.ravel()[keep]])
        new_parents = np.repeat(chosen, children.tokens.shape[1])[keep]
        parents = np.concatenate([parents, new_parents])
        depths = np.concatenate([depths, depths[new_parents] + 1])
        scores = np.concatenate([scores, found[keep]])
        is_open = np.concatenate([is_open, ~ends.ravel()[keep]])
        if growth.least_gain:
            before, expected = expected, _expected(scores, limits.budget)
            if expected - before <= growth.least_gain:
                break
    # A node that was free when it was found may not be free now that better nodes are known.
    worth = max(_worth(scores, limits), limits.free)
    yield TokenTree(tokens, parents, depths, scores).trimmed(min(worth, limits.budget), limits.leaves)


def _bar(scores: FloatArray, budget: int) -> float:
    """The score of the worst node that would be kept; only better ones can enter."""
    if len(scores) < budget:
        return -np.inf
    return float(np.partition(scores, len(scores) - budget)[len(scores) - budget])


def _worth(scores: FloatArray, limits: TreeLimits) -> int:
    """How many nodes are worth their cost, in whole padded rows: the last ones fill theirs or are dropped."""
    worth = min(int(np.count_nonzero(scores > limits.min_logprob)), limits.budget)
    last = worth % limits.rows
    if not last or worth == limits.budget:
        return worth
    filled = min(worth - last + limits.rows, limits.budget, int(np.count_nonzero(scores > -np.inf)))
    chances = np.exp(np.sort(scores)[::-1][worth - last : filled])
    enough = limits.rows * np.exp(limits.min_logprob)
    return filled if chances.sum() >= enough else worth - last


def _expected(scores: FloatArray, budget: int) -> float:
    """Expected tokens per pass of the best nodes so far, the bonus token included."""
    best = np.partition(scores, len(scores) - budget)[-budget:] if len(scores) > budget else scores
    return float(np.exp(best).sum())


def _best_open(scores: FloatArray, eligible: NDArray[np.bool_], width: int) -> IntArray:
    nodes = np.flatnonzero(eligible).astype(np.int32)
    return nodes[np.argsort(-scores[nodes], kind="stable")[:width]]
