"""Trees of running states: what a batch tells of them, where rows are, which states are the same."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.kernels.native import library
from edgespec.kernels.native.library import StateBranching
from edgespec.llama.cache.state_cache import TreeRows, same_states, tree_of
from edgespec.llama.runtime.batch import tree_batch
from edgespec.speculation.tree import TokenTree
from tests.unit.strategies import trees


@given(trees(60), st.integers(0, 500))
def test_a_batch_tells_its_tree(tree: TokenTree, start: int) -> None:
    tried = tree_of(tree_batch(tree, start), 1)
    assert tried.tokens == tree.tokens.tolist()
    assert tried.parents == tree.parents.tolist()
    assert tried.leaf_rows == tree.leaves.tolist()


@given(st.permutations(range(6)), st.integers(0, 3))
def test_logits_are_those_of_the_rows(order: list[int], without: int) -> None:
    logits = np.arange(40, dtype=np.float32).reshape(10, 4)
    placement = TreeRows(np.array(order, dtype=np.int32) + 3, min(without, 3))
    found = placement.select(logits)
    assert (found == [logits[place + 3 - min(without, 3)] for place in order]).all()
    assert (order != sorted(order)) or np.shares_memory(found, logits), "rows in order are not copied"


def state(values: bytes) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * len(values)).from_buffer_copy(values)


def at(position: int) -> bytes:
    return b"keys" + position.to_bytes(4, "little") + b"values"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (at(255), at(255), True),
        (at(255), at(256), True),
        (at(256), at(255), True),
        (at(254), at(255), False),
        (at(255), at(255) + b"s", False),
        (at(255), b"Keys" + at(255)[4:], False),
        (at(255), b"Keys" + at(256)[4:], False),
    ],
)
def test_states_may_differ_in_their_position_alone(one: bytes, other: bytes, same: bool) -> None:
    assert same_states(state(one), state(other), 256) is same


@pytest.fixture
def branching() -> StateBranching:
    if library.loaded() is None:
        pytest.skip("EdgeSpec's own kernels were not compiled")
    return library.load().new_branching()


@pytest.mark.parametrize(
    ("parents", "certain"),
    [
        ([-1, 0, 0, 2, -1], 0),
        ([-1, 0, 0], 4),
        ([-1, 0, 0, 1], 3),
        ([-1, 0, 1, 0], 3),
        ([-1, 0, 3, 1], 1),
        ([-1, 0, -1, 2], 1),
    ],
    ids=["none certain", "too many", "no chain", "above the last", "before its parent", "below padding"],
)
def test_what_is_no_tree_is_refused(branching: StateBranching, parents: list[int], certain: int) -> None:
    with pytest.raises(ValueError, match="rows must come after their parents"):
        branching.begin(np.array(parents, dtype=np.int32), certain, 0)
    branching.begin(np.array([-1, 0, 1, 1, 3, -1], dtype=np.int32), 2, 7)
    assert branching.end() == ""
    branching.close()


def test_contexts_without_number_are_refused(branching: StateBranching) -> None:
    more = [branching]

    def open_many() -> None:
        more.extend(library.load().new_branching() for _ in range(100))

    with pytest.raises(UnsupportedBuild, match="too many contexts"):
        open_many()
    for one in more:
        one.close()
    library.load().new_branching().close()
