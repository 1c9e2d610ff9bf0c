"""What trees yield: tokens a pass by the size of the tree, and where the target's choices were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60, 96, 128)
RANKS = 8  # candidates of a node that are told apart
_WIDTH = 8  # nodes that a draft step usually reads at most
_USUAL_ROWS = 1.7  # nodes that a drafter reads for each of a tree's: seen from 1.6 to 1.8
_MOST_PASSES = 400  # that the past counts for: texts change


@dataclass(frozen=True)
class Yields:
    """Means over passes.

    Attributes:
        passes: for how many they count.
        tokens: accepted tokens a pass, the bonus token included, by budget.
        steps: draft steps a pass, by the budgets that trees were grown with.
        rows: nodes that the drafter reads a pass, by the same: those of the tree, those that better ones
            pushed out of it, and what the text gained since the last one.
        by_rank: share of nodes whose next token was the drafter's first, second, ... candidate.
        by_depth: share of paths that went on from each depth, of those that reached it.
    """

    passes: int
    tokens: Mapping[int, float]
    steps: Mapping[int, float]
    by_rank: Sequence[float] = ()
    by_depth: Sequence[float] = ()
    rows: Mapping[int, float] = field(default_factory=dict)

    def at(self, budget: int) -> float:
        """Tokens a pass with trees of so many nodes."""
        return _between(self.tokens, budget)

    def steps_at(self, budget: int) -> float:
        """Draft steps for trees of so many nodes."""
        return _between({1: 0.0, **self.steps}, budget)

    def rows_at(self, budget: int) -> float:
        """Nodes that the drafter reads for trees of so many nodes."""
        return _between({1: 0.0, **self.rows}, budget) if self.rows else _USUAL_ROWS * (budget - 1)

    def with_steps_of(self, other: Yields) -> Yields:
        """These yields, with the draft steps of a run with smaller trees beside their own."""
        return replace(
            self,
            steps=dict(sorted({**other.steps, **self.steps}.items())),
            rows=dict(sorted({**other.rows, **self.rows}.items())),
        )

    def interpolated(self, other: Yields, share: float) -> Yields:
        """Between these yields and others: all of the others' at a share of 1."""
        budgets = sorted({*self.tokens, *other.tokens})
        return replace(
            self,
            passes=self.passes + other.passes,
            tokens={b: (1 - share) * self.at(b) + share * other.at(b) for b in budgets},
        )

    def corrected(self, ratios: Mapping[int, float], passes: int, steps: float = 1.0) -> Yields:
        """These yields after so many more passes.

        Args:
            ratios: tokens that those passes accepted over what is said here, by budget.
            steps: draft steps that they took over what is said here.
        """

        def moved(ratio: float) -> float:
            return (self.passes + ratio * passes) / (self.passes + passes)

        tokens, most = {}, 1.0
        for budget, before in self.tokens.items():
            tokens[budget] = most = max(1 + (before - 1) * moved(ratios[budget]), most)  # larger hold smaller
        return replace(
            self,
            passes=min(self.passes + passes, _MOST_PASSES),
            tokens=tokens,
            steps={budget: before * moved(steps) for budget, before in self.steps.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            "passes": self.passes,
            "tokens": {str(b): round(t, 4) for b, t in self.tokens.items()},
            "steps": {str(b): round(t, 3) for b, t in self.steps.items()},
            "rows": {str(b): round(t, 3) for b, t in self.rows.items()},
            "by_rank": [round(share, 4) for share in self.by_rank],
            "by_depth": [round(share, 4) for share in self.by_depth],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Yields:
        """From a file.

        Raises:
            KeyError, TypeError, ValueError: the record is not one of these.
        """
        return cls(
            int(record["passes"]),
            {int(b): float(t) for b, t in record["tokens"].items()},
            {int(b): float(t) for b, t in record["steps"].items()},
            tuple(float(share) for share in record["by_rank"]),
            tuple(float(share) for share in record["by_depth"]),
            {int(b): float(t) for b, t in record["rows"].items()},
        )


def expected_yields(agreement: float) -> Yields:
    """What is to be expected of a pair of which nothing is known but how often the first choice is right.

    Of the choices that are not the drafter's first, about half are its second, and so on: close to what was
    seen of real pairs.
    """
    chances = [agreement * (1 - agreement) ** rank for rank in range(RANKS)]
    scores, depths = _best_nodes(chances, BUDGETS[-1])
    tokens = {b: float(sum(scores[:b])) for b in BUDGETS}
    steps = {b: max(max(depths[:b]), (b - 1) / _WIDTH) for b in BUDGETS}
    return Yields(0, tokens, steps, tuple(chances))


def _between(known: Mapping[int, float], budget: int) -> float:
    """Between what is known of smaller and of larger budgets.

    On a line below the smallest that was measured, by doublings from there on: small trees are chains, and
    of large ones each further node adds less.
    """
    budgets, values = list(known), list(known.values())
    if len(budgets) < 2 or budget <= budgets[1]:
        return float(np.interp(budget, budgets, values))
    return float(np.interp(np.log(budget), np.log(budgets), values))


def _best_nodes(chances: Sequence[float], count: int) -> tuple[list[float], list[int]]:
    """Path chances and depths of the best nodes, where every node's candidates have the same chances."""
    import heapq

    heap = [(-1.0, 0)]
    scores: list[float] = []
    depths: list[int] = []
    while len(scores) < count:
        score, depth = heapq.heappop(heap)
        scores.append(-score)
        depths.append(depth)
        for chance in chances:
            heapq.heappush(heap, (score * chance, depth + 1))
    return scores, depths
