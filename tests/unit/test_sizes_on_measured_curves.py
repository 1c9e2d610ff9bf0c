"""Trees sized while running against the best fixed size, from the first token on, on curves as measured.

The curves are those of a model of 1.5 billion parameters with a drafter of 0.5 billion: in memory; streamed,
where the disk hides the arithmetic of all rows; and streamed on a processor whose arithmetic shows from 16
rows on. Texts are simulated: the drafter is sure at some places and not at others, and knows how sure it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import RoundCosts, even_draft_seconds
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.sizing.sizers import AdaptiveSizer, FixedSizer
from edgespec.speculation.tree_search import grow
from tests.tiers import slow_except

_MOST = TreeLimits(budget=60, depth=16, leaves=60)
_RANKS = 8
_ANSWERS = 12

_IN_MEMORY = RoundCosts(Curve.through([(1, 0.029), (8, 0.035), (32, 0.093), (56, 0.158)]), 0.0132, 0.0005)
_STREAMED = RoundCosts(Curve.through([(1, 1.78), (56, 1.78)]), 0.0132, 0.0005)
_ARITHMETIC = RoundCosts(
    Curve.through([(1, 2.3), (8, 2.4), (16, 2.9), (32, 3.9), (56, 6.6)]), step_s=0.06, row_s=0.008
)


@dataclass(frozen=True)
class _Text:
    """A text whose next token is the drafter's first candidate so often, in the mean."""

    agreement: float
    right: float = 1.0  # how often, relative to what the drafter believes


class _Drafter:
    """Grows trees with the real builder, and knows which of their nodes the target chooses."""

    def __init__(self, text: _Text, costs: RoundCosts, seed: int) -> None:
        self._text, self._costs = text, costs
        self._rng = np.random.default_rng(seed)
        self._bounds: dict[tuple[int, ...], np.ndarray] = {}
        self._paths: dict[int, tuple[int, ...]] = {}
        self._steps = self._rows = 0

    def round(self, limits: TreeLimits) -> PassRecord:
        """A round with a tree within these limits."""
        self._bounds, self._paths, self._steps, self._rows = {}, {}, 0, 0
        verify_s = self._costs.verify.at(1) * (1 + 0.03 * self._rng.exponential())
        if not limits.allows_drafting:
            return PassRecord(1, 0, 0.0, verify_s, 0.0)
        tree = grow(0, self._expand, limits)
        node: int | None = 0
        path: tuple[int, ...] = ()
        while node is not None and path in self._bounds:
            rank = int(np.searchsorted(self._bounds[path] * self._text.right, self._rng.random()))
            node, path = tree.child(node, rank), (*path, rank)
        accepted = len(path) - 1 if path and node is None else len(path)
        assert self._costs.step_s is not None
        return PassRecord(
            nodes=len(tree),
            accepted=accepted,
            draft_s=even_draft_seconds(self._costs.step_s, self._costs.row_s, self._steps, self._rows),
            verify_s=self._costs.verify.at(len(tree)) * (1 + 0.03 * self._rng.exponential()),
            accept_s=0.0,
            expected_accepted=tree.expected_accepted,
            draft_steps=self._steps,
            draft_rows=self._rows,
        )

    def _expand(self, frontier: Frontier) -> Children:
        self._steps, self._rows = self._steps + 1, self._rows + len(frontier.nodes)
        rows = []
        nodes = zip(frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        for node, parent, token in nodes:
            self._paths[node] = (*self._paths[parent], token) if parent >= 0 else ()
            first = self._rng.beta(1.5 * self._text.agreement, 1.5 * (1 - self._text.agreement))
            others = (1 - first) * 0.4 * 0.6 ** np.arange(_RANKS - 1)
            chances = -np.sort(-np.array([first, *others]))
            self._bounds[self._paths[node]] = np.cumsum(chances)
            rows.append(np.log(np.maximum(chances, 1e-9)))
        tokens = np.tile(np.arange(_RANKS, dtype=np.int32), (len(rows), 1))
        return Children(tokens, np.array(rows, dtype=np.float32))


def _speed(
    text: _Text, costs: RoundCosts, tokens: int, new: Callable[[], AdaptiveSizer | FixedSizer]
) -> float:
    """Mean speed of answers of so many tokens, each with a new sizer, against plain decoding."""
    total_s, total = 0.0, 0
    for seed in range(_ANSWERS):
        drafter, sizer, made, seconds = _Drafter(text, costs, seed), new(), 0, 0.0
        while made < tokens:
            limits = sizer.limits()
            record = drafter.round(replace(limits, depth=min(limits.depth, tokens - made - 1)))
            sizer.record(record)
            made, seconds = made + record.accepted + 1, seconds + record.seconds
        total, total_s = total + made, total_s + seconds
    return total * 1.03 * costs.verify.at(1) / total_s


def _fixed(nodes: int) -> Callable[[], FixedSizer]:
    return lambda: FixedSizer(replace(_MOST, budget=nodes))


@pytest.mark.parametrize("text", slow_except([_Text(0.72)], [_Text(0.85), _Text(0.72), _Text(0.5)]))
@pytest.mark.parametrize(
    ("costs", "sizes"), [(_IN_MEMORY, (2, 4)), (_STREAMED, (32, 60)), (_ARITHMETIC, (8, 16))]
)
def test_sizes_are_right_from_the_first_token_on(
    costs: RoundCosts, sizes: tuple[int, ...], text: _Text
) -> None:
    best = max(_speed(text, costs, 96, _fixed(nodes)) for nodes in sizes)
    assert _speed(text, costs, 96, lambda: AdaptiveSizer(_MOST, costs)) > 0.88 * best, "up to chance"


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("text", [_Text(0.5), _Text(0.72, right=0.7), _Text(0.6, right=0.2)])
def test_drafting_that_does_not_pay_costs_next_to_nothing_in_short_answers(text: _Text, tokens: int) -> None:
    assert _speed(text, _IN_MEMORY, tokens, lambda: AdaptiveSizer(_MOST, _IN_MEMORY)) > 0.96
