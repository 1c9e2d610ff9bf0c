"""Batched best-first search that serves every tree policy, for one tree or several at once.

The search expands the best open nodes in batches, until no child could be among the best or another draft
step would not pay (SpecExec, Svirschevski et al. 2024, section 4). A child never scores above its parent, so
it is safe not to expand a node that could not put a child among the best. And the expected accepted tokens
that a step can add are at most the sum of the probabilities of the nodes it expands.

Trees that share a pass also share its rows: their nodes compete in one search, so rows go to whichever
sequence has the better use for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

ExpandTogether = Callable[[Sequence[tuple[int, Frontier]]], Sequence[Children]]

# (index of a tree, frontier) -> (nodes,) whether the candidates of a node are known, so that expanding it
# takes no time.
Known = Callable[[int, Frontier], NDArray[np.bool_]]

_USUAL_CONTINUATION = 0.85  # share of a node's expected tokens that its children have, less what they cost


def grow(root: int, expand: Callable[[Frontier], Children], limits: TreeLimits) -> TokenTree:
    """The `budget` best nodes by path score, found in as few draft steps as the policy allows.

    Args:
        root: the last token of the sequence.
        expand: one draft step.
    """

    def expand_one(frontiers: Sequence[tuple[int, Frontier]]) -> Sequence[Children]:
        return [expand(frontier) for _, frontier in frontiers]

    (tree,) = grow_together([TreeSearch(root, limits)], expand_one, limits)
    return tree


def grow_together(
    searches: Sequence[TreeSearch],
    expand: ExpandTogether,
    limits: TreeLimits,
    known: Known | None = None,
) -> list[TokenTree]:
    """The best nodes of several trees within one budget, found in shared draft steps.

    Args:
        expand: one draft step: given frontiers with the index of the tree that each belongs to, returns the
            candidates of each.
        limits: of all trees together. Depth, branching, end tokens and the policy are each tree's own.
        known: what need not be read; such nodes are expanded first, whether or not a draft step would pay.
    """
    steps = draft_steps(searches, limits, known)
    try:
        frontiers = next(steps)
        while True:
            frontiers = steps.send(expand(frontiers))
    except StopIteration as end:
        trees: list[TokenTree] = end.value
        return trees


def draft_steps(
    searches: Sequence[TreeSearch], limits: TreeLimits, known: Known | None = None
) -> Generator[list[tuple[int, Frontier]], Sequence[Children], list[TokenTree]]:
    """`grow_together` as a generator, for callers that answer draft steps in their own time.

    Yields:
        Frontiers with the index of the tree that each belongs to, to be answered with the candidates of each.

    Returns:
        The trees.
    """
    hidden, continuation = limits.overlap_budget, _Continuation(limits)
    for step in range(limits.steps):
        scores = np.concatenate([search.scores for search in searches])
        enters = _bar(scores, limits.budget)
        bar = max(enters, min(limits.min_logprob, _bar(scores, limits.free_nodes)))
        frontiers = _known_frontiers(searches, bar, known) if known is not None and step else []
        if not frontiers:
            if step and hidden + limits.loss_budget < limits.min_gain:
                break
            share = continuation.share if step else None
            frontiers = _frontiers(searches, bar, limits, share, hidden=hidden > limits.min_gain)
            hidden -= limits.min_gain + limits.row_gain * sum(len(part.nodes) for _, part in frontiers)
        if not frontiers:
            break
        found = yield frontiers
        keep_above = enters if limits.row_multiple > 1 else bar  # the rest may fill padding
        for (index, frontier), children in zip(frontiers, found, strict=True):
            search, before = searches[index], len(searches[index].scores)
            search.add(frontier, children, keep_above, limits.budget)
            continuation.add(search.scores[frontier.nodes], search.scores[before:])
    return _best_trees(searches, limits)


class _Continuation:
    """The share of expected tokens that the next step adds, by what the steps before it have added.

    A step adds at most as many expected tokens as the nodes that it expands stand for. How many less depends
    on the text: where it is easy to predict, the children of a node have nearly all of its probability.
    """

    def __init__(self, limits: TreeLimits) -> None:
        self._cost = np.float32(np.exp(limits.min_logprob))
        self._expanded, self._added = 1.0, _USUAL_CONTINUATION

    @property
    def share(self) -> float:
        return self._added / self._expanded

    def add(self, expanded: FloatArray, found: FloatArray) -> None:
        """Learn from a step.

        Args:
            expanded, found: scores of the nodes that it expanded, and of the children that may be kept.
        """
        self._expanded += float(np.exp(expanded).sum())
        self._added += float(np.maximum(np.exp(found) - self._cost, 0).sum())


class TreeSearch:
    """The nodes that a search has found for one tree.

    Args:
        root: the last token of the sequence.
        limits: only depth, branching, end tokens and the tree policy are looked at here; the others hold for
            all trees that grow together.

    Attributes:
        scores: (nodes,) log-probability of each node's path; 0 for the root.
    """

    def __init__(self, root: int, limits: TreeLimits) -> None:
        self.scores: FloatArray = np.zeros(1, dtype=np.float32)
        self._limits = limits
        self._tokens = np.array([root], dtype=np.int32)
        self._parents = np.array([-1], dtype=np.int32)
        self._depths = np.zeros(1, dtype=np.int32)
        self._is_open = np.ones(1, dtype=np.bool_)
        self._steps = 0  # draft steps that this tree has taken part in
        self._expected = 1.0

    def expandable(self, bar: float) -> IntArray:
        """The nodes that may be expanded and score above `bar`."""
        eligible = self._is_open & (self._depths < self._limits.depth) & (self.scores > bar)
        if self._limits.expansion.by_level:
            eligible &= self._depths == self._steps
        return np.flatnonzero(eligible).astype(np.int32)

    @property
    def counts_steps(self) -> bool:
        """True if the policy looks at one draft step after the other."""
        expansion = self._limits.expansion
        return expansion.by_level or expansion.later_branching is not None or expansion.least_gain > 0

    def frontier(self, nodes: IntArray) -> Frontier:
        """These nodes, to be expanded."""
        return Frontier(nodes, self._tokens[nodes], self._parents[nodes], self._depths[nodes])

    def add(self, frontier: Frontier, children: Children, keep_above: float, budget: int) -> None:
        """Add the candidates of a draft step.

        Args:
            keep_above: candidates whose path scores no more cannot become part of the tree.
            budget: most nodes of the tree, for policies that stop when it hardly improves.
        """
        expansion, chosen = self._limits.expansion, frontier.nodes
        self._is_open[chosen] = False
        logprobs = np.minimum(expansion.acceptance.logprobs(children), 0)
        if self._steps and expansion.later_branching is not None:
            logprobs[:, expansion.later_branching :] = -np.inf
        ends = self._ends(children.tokens)
        if not expansion.keeps_ends:
            logprobs[ends] = -np.inf
        found = (self.scores[chosen, None] + logprobs).ravel()
        keep = found > keep_above
        self._tokens = np.concatenate([self._tokens, children.tokens.ravel()[keep]])
        new_parents = np.repeat(chosen, children.tokens.shape[1])[keep]
        self._parents = np.concatenate([self._parents, new_parents])
        self._depths = np.concatenate([self._depths, self._depths[new_parents] + 1])
        self.scores = np.concatenate([self.scores, found[keep]])
        self._is_open = np.concatenate([self._is_open, ~ends.ravel()[keep]])
        self._steps += 1
        if expansion.least_gain:
            before, self._expected = self._expected, _expected(self.scores, budget)
            if self._expected - before <= expansion.least_gain:
                self._is_open[:] = False

    def _ends(self, tokens: IntArray) -> NDArray[np.bool_]:
        if self._limits.is_end is None:
            return np.zeros(tokens.shape, dtype=np.bool_)
        return self._limits.is_end(tokens)

    def tree(self) -> TokenTree:
        """All nodes that were found."""
        return TokenTree(self._tokens, self._parents, self._depths, self.scores)


@dataclass(frozen=True)
class _Candidates:
    """Nodes of all trees that may be expanded; (nodes,) each."""

    trees: IntArray
    nodes: IntArray
    scores: FloatArray

    def take(self, which: NDArray[np.generic]) -> _Candidates:
        return _Candidates(self.trees[which], self.nodes[which], self.scores[which])


def _frontiers(
    searches: Sequence[TreeSearch],
    bar: float,
    limits: TreeLimits,
    continuation: float | None,
    *,
    hidden: bool,
) -> list[tuple[int, Frontier]]:
    """The nodes to expand next, by tree; none if another draft step would not pay.

    Args:
        continuation: the share of the nodes' expected tokens that their children are expected to have; None
            where this step finds the candidates of the roots.
        hidden: it takes no time that would not pass anyway, so it need not pay.
    """
    nodes = [search.expandable(bar) for search in searches]
    candidates = _Candidates(
        np.repeat(np.arange(len(searches), dtype=np.int32), [len(part) for part in nodes]),
        np.concatenate(nodes),
        np.concatenate([search.scores[part] for search, part in zip(searches, nodes, strict=True)]),
    )
    chosen = candidates.take(np.argsort(-candidates.scores, kind="stable")[: limits.width])
    row_gain, min_gain = (0.0, 0.0) if hidden else (limits.row_gain, limits.min_gain)
    gains = np.exp(chosen.scores)
    if continuation is not None:
        gains = continuation * gains - row_gain
        if row_gain:  # without the root's candidates there is no draft
            chosen, gains = chosen.take(gains > 0), gains[gains > 0]
    if gains.sum() <= min_gain:
        return []
    indices = np.unique(chosen.trees).tolist()
    return [(index, searches[index].frontier(chosen.nodes[chosen.trees == index])) for index in indices]


def _known_frontiers(searches: Sequence[TreeSearch], bar: float, known: Known) -> list[tuple[int, Frontier]]:
    """The nodes that can be expanded without a draft step, by tree."""
    found = []
    for index, search in enumerate(searches):
        if search.counts_steps:
            continue
        frontier = search.frontier(search.expandable(bar))
        nodes = frontier.nodes[known(index, frontier)]
        if len(nodes):
            found.append((index, search.frontier(nodes)))
    return found


def _best_trees(searches: Sequence[TreeSearch], limits: TreeLimits) -> list[TokenTree]:
    """The best nodes of all, as trees."""
    scores = np.concatenate([search.scores for search in searches])
    # A node that was free when it was found may not be free now that better nodes are known.
    kept = min(max(_worth(scores, limits), limits.free_nodes), limits.budget)
    if len(searches) == 1:
        return [searches[0].tree().trimmed(kept, limits.leaves)]
    owners = np.repeat(np.arange(len(searches)), [len(search.scores) for search in searches])
    is_root = np.concatenate([[True], owners[1:] != owners[:-1]])
    best = np.argsort(np.where(is_root, -np.inf, -scores), kind="stable")[: max(kept, len(searches))]
    sizes = np.bincount(owners[best], minlength=len(searches))
    trees = [search.tree().trimmed(size) for search, size in zip(searches, sizes.tolist(), strict=True)]
    leaves = np.array([len(tree.leaves) for tree in trees])
    if leaves.sum() > limits.leaves:
        further = max(limits.leaves - len(trees), 0)  # every tree has at least one
        shares = 1 + (leaves - 1) * further // max(int((leaves - 1).sum()), 1)
        trees = [tree.trimmed(len(tree), share) for tree, share in zip(trees, shares.tolist(), strict=True)]
    return trees


def _bar(scores: FloatArray, budget: int) -> float:
    """The score of the worst node that would be kept; only better ones can enter."""
    if len(scores) < budget:
        return -np.inf
    return float(np.partition(scores, len(scores) - budget)[len(scores) - budget])


def _worth(scores: FloatArray, limits: TreeLimits) -> int:
    """Count the nodes worth their cost, in whole padded rows: the last ones fill theirs or are dropped."""
    worth = min(int(np.count_nonzero(scores > limits.min_logprob)), limits.budget)
    last = worth % limits.row_multiple
    if not last or worth == limits.budget:
        return worth
    filled = min(worth - last + limits.row_multiple, limits.budget, int(np.count_nonzero(scores > -np.inf)))
    chances = np.exp(np.sort(scores)[::-1][worth - last : filled])
    enough = limits.row_multiple * np.exp(limits.min_logprob)
    return filled if chances.sum() >= enough else worth - last


def _expected(scores: FloatArray, budget: int) -> float:
    """Expected tokens per pass of the best nodes so far, the bonus token included."""
    best = np.partition(scores, len(scores) - budget)[-budget:] if len(scores) > budget else scores
    return float(np.exp(best).sum())
