"""Branches that outlive their tree, in cells that behave like llama.cpp's."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafters.branches import DraftBranches
from edgespec.llama.cache.shared_cells import SharedCells
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.speculation.growth import Children, Frontier
from tests.tiers import examples
from tests.unit.cells import Cells


def _one(node: int, parent: int, token: int, depth: int) -> Frontier:
    one = np.array([node], dtype=np.int32)
    return Frontier(one, one * 0 + token, one * 0 + parent, one * 0 + depth)


class _Drafted:
    """A text and its branches, read as a drafter reads them, with a plain record of what is where."""

    def __init__(self, window: int = 0) -> None:
        self.context = Cells(window=window)
        context: Any = self.context
        self.cache = BranchingCache(SharedCells(context, ordered=False))
        self.cache.append(TokenBatch.run([3, 1], 0, self.cache.open_paths))
        self.text = [3, 1]
        self.branches = DraftBranches()
        self.branches.found[0] = Children.none(1)
        self.search: list[tuple[int, int, int]] = [(-1, 1, 0)]  # parent, token and depth of a search's nodes
        self.read = {0: 0}  # node of the search -> node of the branches
        self.ahead = 0  # nodes that were read ahead of the search

    def path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node:
            parent, token, _ = self.search[node]
            tokens.insert(0, token)
            node = parent
        return tokens

    def expand(self, parent: int, token: int) -> bool:
        """Search on below a node; returns whether the new node was known."""
        depth = self.search[parent][2] + 1
        node = next((n for n, step in enumerate(self.search) if step[:2] == (parent, token)), None)
        if node is None:
            node = len(self.search)
            self.search.append((parent, token, depth))
        frontier = _one(node, parent, token, depth)
        (known,) = self.branches.known(frontier).tolist()
        (number,) = self.branches.numbers(frontier)
        if number is None:
            path = self.branches.add(node, parent, token, depth, self.cache)
            if path is None:
                return False
            batch = TokenBatch.run([token], len(self.text) - 1 + depth, 1)
            self.cache.try_branches(batch.with_sequences(np.array([path], dtype=np.int32)))
            (number,) = self.branches.numbers(frontier)
            assert number is not None
            self.branches.found[number] = Children.none(1)
        self.read[node] = number
        return known

    def read_with(self, parent: int, token: int, then: list[int]) -> None:
        """Search on below a node, and read a chain below the new one in the same decode."""
        depth, node = self.search[parent][2] + 1, len(self.search)
        if any(step[:2] == (parent, token) for step in self.search):
            return
        self.search.append((parent, token, depth))
        if self.branches.number(node, parent, token) is not None:
            self.read[node] = self.branches.numbers(_one(node, parent, token, depth))[0] or 0
            return
        tokens, paths, above = [token, *then], [], parent
        for below, number in enumerate([node, *range(-1 - self.ahead, -1 - self.ahead - len(then), -1)]):
            path = self.branches.add(number, above, tokens[below], depth + below, self.cache)
            if path is None:
                break
            paths.append(path)
            above = number
        self.ahead += len(then)
        if not paths:
            self.search.pop()
            return
        batch = TokenBatch.run(tokens[: len(paths)], len(self.text) - 1 + depth, 1)
        self.cache.try_branches(batch.with_sequences(np.array(paths, dtype=np.int32)))
        way = self.branches.walk([*self.path(node), *then])[depth:]
        for number in way[: len(paths)]:
            self.branches.found.setdefault(number, Children.none(1))
        self.read[node] = way[0]

    def advance(self, node: int) -> None:
        """The text continues to a node that was read."""
        tokens = self.path(node)
        way = self.branches.walk(tokens)
        last, self.branches = self.branches, self.branches.rerooted(way[-1])
        self.cache.commit(
            last.path_of(way[-1]), len(tokens), last.used_paths, len(last), self.branches.held_paths
        )
        self.text += tokens
        self.search, self.read = [(-1, self.text[-1], 0)], {0: 0}

    def check(self) -> None:
        for path in self.cache.ids:
            assert self.context.seen(path, self.cache.length - 1) == self.text
        for node, number in self.read.items():
            if node:
                sequence = self.cache.ids[self.branches.path_of(number)]
                tokens = self.text + self.path(node)
                assert self.context.seen(sequence, len(tokens) - 1) == tokens


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_every_branch_holds_its_own_path_however_often_the_text_continues(data: st.DataObject) -> None:
    drafted = _Drafted(window=data.draw(st.integers(0, 18)))
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 14))):
            parent, token = data.draw(st.sampled_from(sorted(drafted.read))), data.draw(st.integers(0, 3))
            if data.draw(st.booleans()):
                drafted.read_with(parent, token, data.draw(st.lists(st.integers(0, 3), max_size=3)))
            else:
                drafted.expand(parent, token)
            drafted.check()
        drafted.advance(data.draw(st.sampled_from(sorted(drafted.read))))
        drafted.check()
    drafted.cache.commit(0, 0, drafted.branches.used_paths, len(drafted.branches))
    assert len(drafted.context.cells) == len(drafted.text), "nothing else is kept"
    assert len(drafted.cache.ids) <= Cells.n_sequences


def test_what_was_read_below_the_new_root_is_known() -> None:
    drafted = _Drafted()
    for parent, token in ((0, 5), (0, 6), (1, 7), (1, 8), (3, 9)):
        assert not drafted.expand(parent, token)
    drafted.advance(1)
    assert drafted.text == [3, 1, 5]
    assert drafted.expand(0, 7)
    assert drafted.expand(1, 9)
    assert drafted.expand(0, 8)
    assert not drafted.expand(0, 6)
    drafted.check()


def test_what_was_read_ahead_is_known_when_the_search_comes_upon_it() -> None:
    drafted = _Drafted()
    drafted.read_with(0, 5, [6, 7])
    assert drafted.expand(1, 6)
    assert drafted.expand(2, 7)
    assert not drafted.expand(2, 8)
    drafted.check()
    drafted.advance(2)
    assert drafted.expand(0, 7)
    drafted.check()


def test_a_new_root_without_branches_leaves_nothing() -> None:
    drafted = _Drafted()
    for parent, token in ((0, 5), (0, 6), (2, 7)):
        drafted.expand(parent, token)
    drafted.advance(1)
    assert drafted.branches.held_paths == frozenset()
    assert len(drafted.context.cells) == len(drafted.text)
