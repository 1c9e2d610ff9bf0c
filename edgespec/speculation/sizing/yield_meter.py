"""Measuring what trees yield, from the passes of a run.

One run with large trees also shows what smaller ones would have yielded: the best nodes of a tree by score
are the tree that a smaller budget would have grown, and it would have accepted the same path up to the first
node that is not among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.costs.yields import BUDGETS, RANKS, TreeYields
from edgespec.speculation.tree import IntArray, TokenTree

_DEPTHS = 16


def accepted_by_budget(tree: TokenTree, path: Sequence[int]) -> IntArray:
    """Count the nodes of an accepted path, root included, that a tree of each of BUDGETS would have held.

    Returns:
        (len(BUDGETS),) counts; the whole path for budgets that the tree does not fill.
    """
    places = np.empty(len(tree), dtype=np.int32)
    places[np.argsort(-tree.logprobs, kind="stable")] = np.arange(len(tree))
    furthest = np.maximum.accumulate(places[list(path)])
    return np.searchsorted(furthest, BUDGETS).astype(np.int32)


class YieldMeter:
    """Counts trees and what was accepted of them."""

    def __init__(self) -> None:
        self.passes = 0
        self._most = 1
        self._tokens = np.zeros(len(BUDGETS))
        self._steps = self._rows = 0
        self._ranks = np.zeros(RANKS + 1)
        self._reached, self._went_on = np.zeros(_DEPTHS), np.zeros(_DEPTHS)

    def add(self, tree: TokenTree, path: Sequence[int], bonus: int, steps: int, rows: int) -> None:
        """Count a pass.

        Args:
            path: accepted nodes, from the root.
            bonus: the target's token after them.
            steps, rows: draft steps that the tree took, and the nodes read in them.
        """
        self.passes += 1
        self._steps += steps
        self._rows += rows
        self._most = max(self._most, len(tree))
        self._tokens += accepted_by_budget(tree, path)
        tokens = [*(int(tree.tokens[node]) for node in path[1:]), bonus]
        for depth, (node, token) in enumerate(zip(path, tokens, strict=True)):
            self._count(tree, int(node), token, depth, depth + 1 < len(path))

    def _count(self, tree: TokenTree, node: int, token: int, depth: int, went_on: bool) -> None:
        if depth < _DEPTHS:
            self._reached[depth] += 1
            self._went_on[depth] += went_on
        children = np.flatnonzero(tree.parents == node)
        if not len(children):
            return
        ranked = tree.tokens[children[np.argsort(-tree.logprobs[children], kind="stable")]]
        found = np.flatnonzero(ranked == token)
        self._ranks[min(int(found[0]), RANKS) if len(found) else RANKS] += 1

    def yields(self) -> TreeYields | None:
        """The means, for budgets up to the largest tree; None before the first pass."""
        if not self.passes:
            return None
        tokens = dict(zip(BUDGETS, (self._tokens / self.passes).tolist(), strict=True))
        ranks = self._ranks[:-1] / max(self._ranks.sum(), 1)
        went_on = self._went_on / np.maximum(self._reached, 1)
        return TreeYields(
            self.passes,
            {budget: mean for budget, mean in tokens.items() if budget <= self._most},
            {self._most: self._steps / self.passes},
            tuple(ranks.tolist()),
            tuple(went_on[self._reached > 0].tolist()),
            {self._most: self._rows / self.passes},
        )
