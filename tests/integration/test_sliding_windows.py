"""Layers with sliding windows: llama.cpp keeps every cell that some later text may see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.llama.cache.kv_cache import open_cache
from edgespec.llama.cache.shared_cells import SharedCells
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, NoRoomInCache
from edgespec.llama.runtime.model import Model
from tests.tiers import examples
from tests.tiny import write_tiny

N_CELLS, N_ROWS = 256, 64


@pytest.fixture(scope="module")
def context(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    path = write_tiny(tmp_path_factory.mktemp("windows") / "windows.gguf", "gemma3", smol_path)
    with Model(path) as model:
        context = Context(model, n_cells=N_CELLS, n_rows=N_ROWS, n_outputs=8, n_sequences=6, n_threads=1)
        assert 0 < context.window < 16
        yield context
        context.close()


@pytest.fixture(scope="module")
def state_sizes(context: Context) -> list[int]:
    """Bytes that the state of a sequence takes, by its length."""
    context.clear()
    cache = open_cache(context, ordered=True)
    sizes = [len(cache.save(0, 0))]
    for length in range(N_CELLS - 1):
        cache.append(TokenBatch.run([1], length, cache.open_paths))
        sizes.append(len(cache.save(0, length + 1)))
    return sizes


@pytest.mark.parametrize("move", ["compact", "restore"])
def test_what_was_moved_can_be_shortened_by_more_than_a_sliding_window(move: str, context: Context) -> None:
    context.clear()
    text = np.arange(20, 80, dtype=np.int32)
    cache = open_cache(context, ordered=True)

    def logits_behind(length: int) -> np.ndarray:
        cache.append(TokenBatch.run(text[length - 1 : length], length - 1, cache.open_paths, "all"))
        return context.logits().copy()

    cache.append(TokenBatch.run(text[:29], 0, cache.open_paths))
    expected = logits_behind(30)
    cache.append(TokenBatch.run(text[30:], 30, cache.open_paths))
    if move == "compact":
        cache.try_branches(TokenBatch.run(text[:7], 60, 1, "all"), 8)
        cache.commit(0, 0, 1, 7)
        cache.compact()
    else:
        state = cache.save(0, 60)
        cache.rewind(0)
        cache.restore(state, 60)
    assert cache.length == 60
    cache.rewind(29)
    np.testing.assert_array_equal(logits_behind(30), expected)


class _Sequences:
    """Sequences in the cells of a context, whose saved states tell how many cells each has."""

    def __init__(self, context: Context, *, ordered: bool) -> None:
        context.clear()
        self.context = context
        self.open = [BranchingCache(SharedCells(context, ordered=ordered))]

    def append(self, data: st.DataObject) -> None:
        cache, length = self._any(data), data.draw(st.integers(1, 20))
        cache.append(TokenBatch.run([1] * length, cache.length, cache.open_paths))

    def try_branch(self, data: st.DataObject) -> None:
        cache, rows = self._any(data), data.draw(st.integers(1, 12))
        cache.open(1)
        cache.try_branches(TokenBatch.run([2] * rows, cache.length, 1))
        cache.commit(0, data.draw(st.integers(0, rows)), 1, rows)

    def rewind(self, data: st.DataObject) -> None:
        cache = self._any(data)
        cache.rewind(data.draw(st.integers(0, cache.length)))

    def share(self, data: st.DataObject) -> None:
        source = self._any(data)
        if len(self.open) < 3:
            self.open.append(source.another())
            self.open[-1].inherit(source, data.draw(st.integers(0, source.length)))

    def leave(self, data: st.DataObject) -> None:
        if len(self.open) > 1:
            cache = self._any(data)
            self.open.remove(cache)
            cache.close()

    def compact(self, _: st.DataObject) -> None:
        if self.open[0].ordered:
            self.open[0].compact()

    def recover(self, _: st.DataObject) -> None:
        self.open[0].recover()

    def set_aside(self, data: st.DataObject) -> None:
        cache = self._any(data)
        length = cache.length
        state = cache.save(0, length)
        cache.rewind(0)
        if length:
            cache.restore(state, length)

    def _any(self, data: st.DataObject) -> BranchingCache:
        return self.open[data.draw(st.integers(0, len(self.open) - 1))]


ACTIONS = [name for name, action in vars(_Sequences).items() if callable(action) and name[0] != "_"]


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_sequences_lose_no_cell_whatever_others_do(
    context: Context, state_sizes: list[int], data: st.DataObject
) -> None:
    sequences = _Sequences(context, ordered=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(ACTIONS))
        try:
            getattr(sequences, action)(data)
        except NoRoomInCache:
            sequences.open[0].recover()
        for cache in sequences.open:
            assert len(cache.save(0, cache.length)) == state_sizes[cache.length], action
