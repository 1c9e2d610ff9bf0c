"""The yield of a pair's trees is learned from answers where nothing else has measured it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.generation.result import PassRecord
from edgespec.llama.runtime.weight_store import WeightStore
from edgespec.profiles.store import ProfileKeys, ProfileStore
from edgespec.profiles.updates import ProfileUpdates
from edgespec.speculation.tree import TokenTree

KEYS = ProfileKeys.of("target", "drafter", threads=2, mode="")


class _InMemory(WeightStore):
    """Weights that are not read from disk."""

    streamed_bytes = 0
    read_bytes = 0
    reading_s = 0.0
    experts_held = 0.0

    def __init__(self) -> None:
        pass


def _answer(updates: ProfileUpdates, nodes: int, accepted: int, passes: int) -> None:
    tree = TokenTree.chain(range(nodes), (-0.1 * np.arange(nodes)).tolist())
    record = PassRecord(nodes, accepted, 0.5, 1.0, 0.0, draft_steps=5, draft_rows=9)
    for _ in range(passes):
        updates.add_tree(tree, range(accepted + 1), record, 0.0)


@pytest.mark.parametrize("nodes", [16, 60])
def test_large_trees_say_what_the_pair_yields(tmp_path: Path, nodes: int) -> None:
    store = ProfileStore(tmp_path)
    updates = ProfileUpdates(KEYS, store)
    _answer(updates, nodes, 6, 20)
    updates.save(_InMemory())
    yields = store.yields(KEYS.yields(0.0))
    assert yields is not None
    assert max(yields.tokens) <= nodes
    assert yields.at(4) == 4, "a smaller tree would have held the first nodes of the path"
    assert yields.at(nodes) == 7
    assert (yields.steps_at(nodes), yields.rows_at(nodes)) == (5, 9)
    assert store.yields(KEYS.yields(1.0)) is None, "nothing was sampled"

    _answer(updates, nodes, 2, 20)
    updates.save(_InMemory())
    corrected = store.yields(KEYS.yields(0.0))
    assert corrected is not None
    assert 3 < corrected.at(nodes) < 7, "further answers correct it"


@pytest.mark.parametrize(("nodes", "passes"), [(16, 5), (4, 100)])
def test_few_or_small_trees_say_nothing(tmp_path: Path, nodes: int, passes: int) -> None:
    store = ProfileStore(tmp_path)
    updates = ProfileUpdates(KEYS, store)
    _answer(updates, nodes, 3, passes)
    updates.save(_InMemory())
    assert store.yields(KEYS.yields(0.0)) is None
