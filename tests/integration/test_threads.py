"""Threads are really measured, and the text does not depend on how many there are."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec.generation.config import GenerationConfig
from edgespec.measure import threads as threads_module
from edgespec.measure.threads import choose_threads
from edgespec.profiles.store import ProfileStore


@pytest.mark.slow
def test_counts_are_timed_and_one_of_them_is_taken(q4_drafter_path: Path, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    config = GenerationConfig(max_tokens=8)
    with edgespec.load(q4_drafter_path, draft="none", context=256, exact=True, threads=1) as engine:
        expected = engine.generate("Why is the sky blue?", config).tokens
        assert engine.keys is not None
        timed = threads_module._measure(engine.target, (1, 2))
        assert {count: set(rows) for count, rows in timed.items()} == {1: {1, 8, 32}, 2: {1, 8, 32}}
        assert all(seconds > 0 for rows in timed.values() for seconds in rows.values())
        chosen = choose_threads(engine.target, engine.keys.target, store, (1, 2))
        assert chosen in (1, 2)
        assert engine.target.context.n_threads == chosen
        engine.target.rewind(0)
        assert engine.generate("Why is the sky blue?", config).tokens == expected
        store.put_threads(threads_module._key(engine.keys.target), 2, timed)
        assert choose_threads(engine.target, engine.keys.target, store, (1, 2)) == 2
        assert choose_threads(engine.target, engine.keys.target, store, (1,)) == 1
