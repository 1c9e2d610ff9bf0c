"""How a token tree grows: best-first under a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.tree import MAX_LEAVES, FloatArray, IntArray, TokenTree


@dataclass(frozen=True)
class TreeLimits:
    """What a tree may cost.

    Attributes:
        budget: most nodes, the root included.
        depth: most edges from the root.
        leaves: most leaves.
        width: most nodes expanded in one draft step.
        branching: most children a node gets.
        min_logprob: drafted nodes whose path does not score above this are not worth their cost.
    """

    budget: int
    depth: int = 16
    leaves: int = MAX_LEAVES
    width: int = 8
    branching: int = 8
    min_logprob: float = -np.inf

    @property
    def allows_drafting(self) -> bool:
        """Whether the tree may be more than its root."""
        return self.budget > 1 and self.depth > 0


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
    """The best children of the nodes of a frontier, best first.

    Attributes:
        tokens: (width, branching) token ids.
        logprobs: (width, branching) log-probability of each given its parent; -inf for none.
    """

    tokens: IntArray
    logprobs: FloatArray

    @classmethod
    def none(cls, width: int, branching: int = 1) -> Children:
        """No children yet."""
        shape = (width, branching)
        return cls(np.zeros(shape, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32))


def grow_best_first(root: int, expand: Callable[[Frontier], Children], limits: TreeLimits) -> TokenTree:
    """The `budget` likeliest nodes by the drafter's path probability.

    A batched best-first search (SpecExec, Svirschevski et al. 2024, section 4): each draft step expands
    the best open nodes together, and it ends when none of them could put a child among the best. A
    child never scores above its parent, so nothing that is left out is ever needed.

    Args:
        root: the last token of the text.
        expand: one draft step.
    """
    tokens = np.array([root], dtype=np.int32)
    parents = np.array([-1], dtype=np.int32)
    depths = np.zeros(1, dtype=np.int32)
    scores = np.zeros(1, dtype=np.float32)
    is_open = np.ones(1, dtype=np.bool_)
    while True:
        bar = max(_bar(scores, limits.budget), limits.min_logprob)
        chosen = _best_open(scores, is_open & (depths < limits.depth) & (scores > bar), limits.width)
        if not len(chosen):
            break
        children = expand(Frontier(chosen, tokens[chosen], parents[chosen], depths[chosen]))
        is_open[chosen] = False
        found = (scores[chosen, None] + np.minimum(children.logprobs, 0)).ravel()
        keep = found > bar
        tokens = np.concatenate([tokens, children.tokens.ravel()[keep]])
        new_parents = np.repeat(chosen, children.tokens.shape[1])[keep]
        parents = np.concatenate([parents, new_parents])
        depths = np.concatenate([depths, depths[new_parents] + 1])
        scores = np.concatenate([scores, found[keep]])
        is_open = np.concatenate([is_open, np.ones(len(new_parents), dtype=np.bool_)])
    return TokenTree(tokens, parents, depths, scores).trimmed(limits.budget, limits.leaves)


def _bar(scores: FloatArray, budget: int) -> float:
    """The score of the worst node that would be kept; nothing worse can enter."""
    if len(scores) < budget:
        return -np.inf
    return float(np.partition(scores, len(scores) - budget)[len(scores) - budget])


def _best_open(scores: FloatArray, eligible: NDArray[np.bool_], width: int) -> IntArray:
    nodes = np.flatnonzero(eligible).astype(np.int32)
    return nodes[np.argsort(-scores[nodes], kind="stable")[:width]]
