"""A cache without room for what is asked of it: an error with its size, and the text stays what it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import EdgeSpecError
from edgespec.llama.cache.kv_cache import open_cache
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, NoRoomInCache
from edgespec.llama.runtime.model import Model
from tests.tiny import write_tiny

N_ROWS = 16


@pytest.fixture(scope="module")
def model(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_tiny(tmp_path_factory.mktemp("models") / "tiny-llama.gguf", "llama", smol_path))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_full_cache_says_so_and_keeps_its_text(model: Model, ordered: bool) -> None:
    context = Context(model, n_cells=256, n_rows=N_ROWS, n_outputs=4, n_sequences=4, n_threads=1)
    cache = open_cache(context, ordered=ordered)
    text = [30 + i % 11 for i in range(context.n_cells + N_ROWS)]

    def read(start: int, end: int) -> None:
        for at in range(start, end, N_ROWS):
            piece = text[at : min(at + N_ROWS, end)]
            cache.append(TokenBatch.run(piece, at, cache.open_paths, "last"), len(piece))

    whole = context.n_cells - N_ROWS // 2
    read(0, whole)
    before = bytes(cache.save(0, whole))
    with pytest.raises(NoRoomInCache, match=rf"{context.n_cells} cells.*context") as refused:
        read(whole, whole + N_ROWS)
    assert isinstance(refused.value, EdgeSpecError), "it is told like every other error"
    cache.recover()
    assert cache.length == whole
    assert bytes(cache.save(0, whole)) == before

    # With room made, the text continues as if nothing had happened.
    cache.rewind(N_ROWS)
    read(N_ROWS, 2 * N_ROWS)
    after = context.logits().copy()
    context.clear()
    fresh = open_cache(context, ordered=ordered)
    fresh.append(TokenBatch.run(text[:N_ROWS], 0, fresh.open_paths), N_ROWS)
    fresh.append(TokenBatch.run(text[N_ROWS : 2 * N_ROWS], N_ROWS, fresh.open_paths, "last"), N_ROWS)
    np.testing.assert_allclose(after, context.logits(), rtol=0, atol=1e-3)


def test_a_saved_text_that_is_longer_than_the_cache_is_refused(model: Model) -> None:
    large = Context(model, n_cells=512, n_rows=N_ROWS, n_outputs=1, n_sequences=4, n_threads=1)
    small = Context(model, n_cells=256, n_rows=N_ROWS, n_outputs=1, n_sequences=4, n_threads=1)
    source, cache = open_cache(large, ordered=True), open_cache(small, ordered=True)
    n_tokens = small.n_cells + N_ROWS
    for at in range(0, n_tokens, N_ROWS):
        source.append(TokenBatch.run(list(range(30, 30 + N_ROWS)), at, source.open_paths), N_ROWS)
    with pytest.raises(NoRoomInCache):
        cache.restore(source.save(0, n_tokens), n_tokens)
    assert cache.length == 0


def test_a_text_keeps_to_its_own_sequences(model: Model) -> None:
    """Whatever ids it has got: here those that another text gave back, in another order."""
    context = Context(model, n_cells=256, n_rows=N_ROWS, n_outputs=8, n_sequences=10, n_threads=1)
    cache = open_cache(context, ordered=True)
    assert isinstance(cache, BranchingCache)
    others = [cache.another() for _ in range(4)]
    for other in (others[3], others[2], others[0], others[1]):
        other.close()
    cache.open(4)
    assert cache.ids == [0, 2, 1, 3]
    rows = TokenBatch.run([30, 31], 0, 4, "all")
    mapped = cache.numbered(rows)
    assert mapped.sequence_ids.tolist() == cache.ids * 2
    cache.append(rows, 2)
    assert cache.length == 2
