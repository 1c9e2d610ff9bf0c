"""How a token tree grows: one builder for every policy.

A tree policy gives every edge the log of a chance, so that a path's score never rises on its way down and
the best nodes under a budget are a tree by themselves. The builder finds them: it expands the best open
nodes in batches, until none could put a child among the best or another draft step would not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.tree import MAX_LEAVES, FloatArray, IntArray, TokenTree


@dataclass(frozen=True)
class Frontier:
    """Nodes to expand in one draft step; node numbers count in the order nodes were found.

    Attributes:
        nodes, tokens, parents, depths: (width,) each.
    """

    nodes: IntArray
    tokens: IntArray
    parents: IntArray
    depths: IntArray


@dataclass(frozen=True)
class Children:
    """Candidates for the children of the nodes of a frontier, the drafter's best first.

    Attributes:
        tokens: (width, branching) token ids.
        logprobs: (width, branching) log-probability of each given its parent; -inf for none.
        matches: (width, branching) tokens of the text before each that stood before it once already
            (prompt lookup); None if nothing was looked up.
    """

    tokens: IntArray
    logprobs: FloatArray
    matches: IntArray | None = None

    @classmethod
    def none(cls, width: int, branching: int = 1) -> Children:
        """No children yet."""
        shape = (width, branching)
        return cls(np.zeros(shape, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32))

    def row(self, row: int) -> Children:
        """The candidates of one node of the frontier."""
        part = slice(row, row + 1)
        return Children(
            self.tokens[part], self.logprobs[part], None if self.matches is None else self.matches[part]
        )

    def first(self, count: int) -> Children:
        """The best `count` candidates of each node."""
        return Children(
            self.tokens[:, :count],
            self.logprobs[:, :count],
            None if self.matches is None else self.matches[:, :count],
        )

    @property
    def proposed(self) -> NDArray[np.bool_]:
        """(width, branching) whether there is a candidate."""
        listed = self.logprobs > -np.inf
        return listed if self.matches is None else listed | (self.matches > 0)


class Chances(Protocol):
    """The chance that the target takes a candidate, given that it took the parent."""

    def edges(self, children: Children) -> FloatArray:
        """(width, branching) log-chances, at most 0; -inf leaves a candidate out."""

    def learn(self, children: Children, after: int, token: int) -> None:
        """Learn what the target took.

        Args:
            children: the candidates of one node.
            after: the node's token.
            token: what the target took, whether it was a candidate or not.
        """

    def keep(self) -> None:
        """Remember what was learned for the next run, where there is something to remember."""


# The chance of a token that only the text proposes, by tokens matched: where no model was asked, and where
# one was and thinks little of it. Rough values, whose order is what matters for a tree.
_LOOKED_UP = np.log([1e-9, 0.15, 0.4, 0.6, 0.75]).astype(np.float32)
_DOUBTED = np.log([1e-9, 0.01, 0.02, 0.03, 0.05]).astype(np.float32)


class DrafterProbability(Chances):
    """The drafter's own probability."""

    def edges(self, children: Children) -> FloatArray:
        edges = np.minimum(children.logprobs, 0)
        if children.matches is not None:
            matches = np.minimum(children.matches, len(_LOOKED_UP) - 1)
            listed = np.isfinite(children.logprobs)
            alone = np.where(listed.any(axis=1, keepdims=True), _DOUBTED[matches], _LOOKED_UP[matches])
            edges = np.where(~listed & (matches > 0), alone, edges)
        return edges

    def learn(self, children: Children, after: int, token: int) -> None:
        pass

    def keep(self) -> None:
        pass


@dataclass(frozen=True)
class Growth:
    """A tree policy, as far as the builder knows it.

    Attributes:
        chances: what scores are made of.
        by_level: expand nodes of the newest level only, instead of the best anywhere.
        least_gain: stop after a draft step that raised the tree's expected accepted tokens by no more.
        later_branching: most children of a node below the root, where they are fewer than the root's.
        merges: whether a model drafter may take in what the text itself proposes.
        ends: whether tokens that end the answer become nodes. Where the target chooses, such a node is a row
            for nothing: the choice behind its parent says the same. Rules that judge drafted tokens must
            see it. Nothing ever grows below one.
    """

    chances: Chances = field(default_factory=DrafterProbability)
    by_level: bool = False
    least_gain: float = 0.0
    later_branching: int | None = None
    merges: bool = True
    ends: bool = False


@dataclass(frozen=True)
class TreeLimits:
    """What a tree may cost, and how it grows.

    Attributes:
        budget: most nodes, the root included.
        depth: most edges from the root.
        leaves: most leaves.
        width: most nodes expanded in one draft step.
        branching: most children a node gets.
        min_logprob: drafted nodes whose path does not score above this are not worth their cost.
        free: nodes, the root included, that cost nothing, however they score.
        rows: what a pass rounds its nodes up to: the last few of a tree must be worth so many, and the next
            best fill them up.
        min_gain: accepted tokens that a draft step must promise to be worth its cost; `row_gain` the same of
            every node it reads.
        steps: most draft steps.
        growth: the policy.
        ends: says of tokens whether each ends an answer; None if no token does. No text goes on behind one.
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
    """The `budget` best nodes by path score, found with as few draft steps as the policy allows.

    Args:
        root: the last token of the text.
        expand: one draft step.
    """
    search = growing(root, limits)
    frontier = next(search)
    while isinstance(frontier, Frontier):
        frontier = search.send(expand(frontier))
    return frontier


def growing(root: int, limits: TreeLimits) -> Generator[Frontier | TokenTree, Children | None]:
    """The search for a tree, for callers who answer draft steps when they like.

    A batched best-first search (SpecExec, Svirschevski et al. 2024, section 4). A child never scores above
    its parent, so a node that is not expanded because it could not put a child among the best is never
    missed; and a step can add no more accepted tokens than the chances of the nodes it expands sum up to.

    Yields:
        Frontiers, each to be answered with its candidates; last of all the tree.
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
        if step and limits.row_gain:  # the root's candidates are what drafting is about
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
        keep = found > (enters if limits.rows > 1 else bar)  # what is not worth a row may fill one
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
    # What was free when it was found may not be, now that better nodes are there.
    worth = max(_worth(scores, limits), limits.free)
    yield TokenTree(tokens, parents, depths, scores).trimmed(min(worth, limits.budget), limits.leaves)


def _bar(scores: FloatArray, budget: int) -> float:
    """The score of the worst node that would be kept; nothing worse can enter."""
    if len(scores) < budget:
        return -np.inf
    return float(np.partition(scores, len(scores) - budget)[len(scores) - budget])


def _worth(scores: FloatArray, limits: TreeLimits) -> int:
    """Nodes that are worth what they cost, in whole rows: the last few fill theirs, or are left out."""
    worth = min(int(np.count_nonzero(scores > limits.min_logprob)), limits.budget)
    last = worth % limits.rows
    if not last or worth == limits.budget:
        return worth
    filled = min(worth - last + limits.rows, limits.budget, int(np.count_nonzero(scores > -np.inf)))
    chances = np.exp(np.sort(scores)[::-1][worth - last : filled])
    enough = limits.rows * np.exp(limits.min_logprob)
    return filled if chances.sum() >= enough else worth - last


def _expected(scores: FloatArray, budget: int) -> float:
    """Expected tokens a pass, the root's included, of the best nodes so far."""
    best = np.partition(scores, len(scores) - budget)[-budget:] if len(scores) > budget else scores
    return float(np.exp(best).sum())


def _best_open(scores: FloatArray, eligible: NDArray[np.bool_], width: int) -> IntArray:
    nodes = np.flatnonzero(eligible).astype(np.int32)
    return nodes[np.argsort(-scores[nodes], kind="stable")[:width]]
