"""Yields: tokens per pass by tree size, and which of the drafter's candidates the target chose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60, 96, 128, 192, 256)
USUAL_AGREEMENT = 0.7  # of a drafter with its target, where nothing was measured
RANKS = 8  # candidates of a node that are counted separately
_WIDTH = 8  # usual limit of nodes read in a draft step
_USUAL_ROWS = 1.7  # nodes that a drafter reads per node of the tree: measured from 1.6 to 1.8
_MAX_PASSES = 400  # weight of the past is capped here, because texts change


@dataclass(frozen=True)
class TreeYields:
    """Means over passes."""

    passes: int  # how many passes the means stand for
    tokens: Mapping[int, float]  # accepted tokens per pass, the bonus token included, by budget
    steps: Mapping[int, float]  # draft steps per pass, by the budgets that trees were grown with
    # share of nodes whose next token was the drafter's first, second, ... candidate.
    by_rank: Sequence[float] = ()
    by_depth: Sequence[float] = ()  # of the paths that reached each depth, the share that went further
    # nodes that the drafter reads per pass, by the same budgets: those in the tree, those displaced by better
    # ones, and the tokens the text gained since the last tree.
    rows: Mapping[int, float] = field(default_factory=dict)

    def at(self, budget: int) -> float:
        """Tokens per pass with trees of this many nodes."""
        return _between(self.tokens, budget)

    def steps_at(self, budget: int) -> float:
        """Draft steps for a tree of this many nodes."""
        return _between({1: 0.0, **self.steps}, budget)

    def rows_at(self, budget: int) -> float:
        """Nodes that the drafter reads for a tree of this many nodes."""
        return _between({1: 0.0, **self.rows}, budget) if self.rows else _USUAL_ROWS * (budget - 1)

    def reaching(self, budget: int) -> TreeYields:
        """The yields with a point at this budget, extrapolated if no tree was so large.

        Tokens and draft steps continue over the logarithm of the budget, as the last two budgets have them,
        and the rows that a drafter reads in proportion to it.
        """
        largest = max(self.tokens)
        if budget <= largest:
            return self
        before = max((known for known in self.tokens if known < largest), default=largest)
        share = math.log(budget / largest) / math.log(largest / before) if before < largest else 0.0
        tokens, steps, rows = self.at(largest), self.steps_at(largest), self.rows_at(largest)
        return replace(
            self,
            tokens={**self.tokens, budget: tokens + share * (tokens - self.at(before))},
            steps={**self.steps, budget: steps + share * (steps - self.steps_at(before))},
            rows={**self.rows, budget: rows * budget / largest},
        )

    def interpolated(self, other: TreeYields, share: float) -> TreeYields:
        """Yields between these (share 0) and others (share 1)."""
        budgets = sorted({*self.tokens, *other.tokens})
        return replace(
            self,
            passes=self.passes + other.passes,
            tokens={b: (1 - share) * self.at(b) + share * other.at(b) for b in budgets},
        )

    def corrected(self, ratios: Mapping[int, float], passes: int, steps: float = 1.0) -> TreeYields:
        """These yields updated by further passes.

        Args:
            ratios: accepted drafted tokens of those passes relative to these yields, by budget.
            passes: how many there were.
            steps: their draft steps relative to these yields.
        """

        def moved(ratio: float) -> float:
            return (self.passes + ratio * passes) / (self.passes + passes)

        tokens, most = {}, 1.0
        for budget, before in self.tokens.items():  # larger trees never yield less
            tokens[budget] = most = max(1 + (before - 1) * moved(ratios[budget]), most)
        return replace(
            self,
            passes=min(self.passes + passes, _MAX_PASSES),
            tokens=tokens,
            steps={budget: before * moved(steps) for budget, before in self.steps.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for the profile store."""
        return {
            "passes": self.passes,
            "tokens": {str(b): round(t, 4) for b, t in self.tokens.items()},
            "steps": {str(b): round(t, 3) for b, t in self.steps.items()},
            "rows": {str(b): round(t, 3) for b, t in self.rows.items()},
            "by_rank": [round(share, 4) for share in self.by_rank],
            "by_depth": [round(share, 4) for share in self.by_depth],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TreeYields:
        """Restore from the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is not such a record.
        """
        return cls(
            int(record["passes"]),
            {int(b): float(t) for b, t in record["tokens"].items()},
            {int(b): float(t) for b, t in record["steps"].items()},
            tuple(float(share) for share in record["by_rank"]),
            tuple(float(share) for share in record["by_depth"]),
            {int(b): float(t) for b, t in record["rows"].items()},
        )


def expected_yields(agreement: float) -> TreeYields:
    """Yields of a pair of which only the agreement is known: how often the drafter's first choice is right.

    Where the first choice is wrong, the second is assumed to be right as often as the first, and so on: close
    to what real pairs show.
    """
    chances = [agreement * (1 - agreement) ** rank for rank in range(RANKS)]
    scores, depths = _best_nodes(chances, BUDGETS[-1])
    tokens = {b: float(sum(scores[:b])) for b in BUDGETS}
    steps = {b: max(max(depths[:b]), (b - 1) / _WIDTH) for b in BUDGETS}
    return TreeYields(0, tokens, steps, tuple(chances))


def expected_chain_yields(agreement: float) -> TreeYields:
    """The yield of a single path: each token is accepted if all before it were."""
    tokens = {b: (1 - agreement**b) / (1 - agreement) for b in BUDGETS}
    steps = {b: float(b - 1) for b in BUDGETS if b > 1}
    return TreeYields(0, tokens, steps, (agreement,), rows=steps)


def on_code(yields: TreeYields) -> TreeYields:
    """The yields on code, from those on prose.

    A drafter differs from its target half as often there: with Qwen2.5-Coder 1.5B and 0.5B, trees of 16 nodes
    yield 9.1 tokens a pass on code and 5.4 on prose.
    """
    prose = expected_yields(USUAL_AGREEMENT)
    code = expected_yields((1 + USUAL_AGREEMENT) / 2)

    def tokens(budget: int, known: float) -> float:
        more = (code.at(budget) - 1) / (prose.at(budget) - 1) if budget > 1 else 1.0
        return min(1 + (known - 1) * more, budget)

    return replace(yields, tokens={budget: tokens(budget, known) for budget, known in yields.tokens.items()})


def _between(known: Mapping[int, float], budget: int) -> float:
    """Interpolate between measured budgets.

    Linearly below the second of them and over the logarithm of the budget beyond, because small trees are
    chains and every further node of a large tree adds less.
    """
    budgets, values = list(known), list(known.values())
    if len(budgets) < 2 or budget <= budgets[1]:
        return float(np.interp(budget, budgets, values))
    return float(np.interp(np.log(budget), np.log(budgets), values))


def _best_nodes(chances: Sequence[float], count: int) -> tuple[list[float], list[int]]:
    """Path probabilities and depths of the best nodes, if all nodes have the same candidate probabilities."""
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
