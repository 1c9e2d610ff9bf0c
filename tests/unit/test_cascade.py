"""Cascade: the drafter reads chains that a source is sure of ahead of the search, as far as they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.drafters.cascade import Cascade, rows_are_cheap
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.ranking import ByProbability
from edgespec.speculation.sources.base import proposals_of
from edgespec.speculation.sources.text import TextSource

TEXT = [*range(1, 13), 20] * 3  # sure to continue with 1, 2, 3 ...
LIMITS = TreeLimits(64, depth=16, min_gain=0.1, row_gain=0.01)  # a row costs a tenth of a step


def _node(number: int, token: int, parent: int, depth: int) -> Frontier:
    one = np.ones(1, dtype=np.int32)
    return Frontier(one * number, one * token, one * parent, one * depth)


def _chain(cascade: Cascade, limits: TreeLimits = LIMITS, room: int = 5, token: int = 1) -> Frontier:
    """Rows read beside a child of the root."""
    proposals = proposals_of([TextSource()], TEXT, limits.depth)
    proposals.join(_node(0, TEXT[-1], -1, 0), Children.none(1, 0))
    return cascade.chains(_node(1, token, 0, 1), proposals, limits, ByProbability(), len(TEXT), room)


def test_each_node_is_below_the_one_before_it() -> None:
    chain = _chain(Cascade())
    assert chain.tokens.tolist() == [2, 3, 4, 5, 6], "as many as there is room for"
    assert chain.depths.tolist() == [2, 3, 4, 5, 6]
    assert chain.parents.tolist() == [1, *chain.nodes.tolist()[:-1]]
    assert (chain.nodes < 0).all()
    assert len(set(chain.nodes.tolist())) == 5


def test_nothing_is_read_that_no_source_is_sure_of() -> None:
    assert len(_chain(Cascade(), token=19).nodes) == 0
    assert len(_chain(Cascade(), room=0).nodes) == 0


def test_a_row_must_cost_less_than_the_steps_it_saves() -> None:
    read = [len(_chain(Cascade(), replace(LIMITS, row_gain=gain)).nodes) for gain in (0.01, 0.05, 0.1)]
    assert read[0] > read[1] > read[2] == 0


def test_rows_must_be_cheap() -> None:
    assert rows_are_cheap(LIMITS)
    assert not rows_are_cheap(replace(LIMITS, row_gain=0.05))
    assert not rows_are_cheap(TreeLimits(64)), "nothing was measured"


def test_what_the_tree_cannot_hold_is_not_read() -> None:
    assert _chain(Cascade(), replace(LIMITS, depth=4)).depths.tolist() == [2, 3]
    ends = replace(LIMITS, ends=lambda tokens: np.asarray(tokens) == 4)
    assert _chain(Cascade(), ends).tokens.tolist() == [2, 3]


def test_where_the_search_does_not_come_upon_them_fewer_are_read() -> None:
    useless, useful = Cascade(), Cascade()
    for _ in range(30):
        _chain(useless)
        useful.came_upon(len(_chain(useful).nodes))
    assert len(_chain(useless).nodes) == 0
    assert len(_chain(useful).nodes) == 5
