"""Prompts of streamed models are read in long pieces where that gives the bits of short ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.sequence import TextSequence
from edgespec.generation.config import GenerationConfig
from edgespec.llama.prefill_chunks import PrefillChunks
from edgespec.llama.row_rule import ANY_ROWS, RowRule
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.offload.attention import RowAttention
from edgespec.offload.weights import StreamedWeights
from edgespec.planning.memory import rows
from tests.integration.test_streaming import load_streamed
from tests.tiers import slow_except

PROMPT = "The river was high that spring, and nobody crossed it without a reason. " * 24
CONTEXT = 768


@pytest.fixture(
    scope="module", params=slow_except(["short_path"], ["short_path", "q4_drafter_path", "gemma_path"])
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With ggml's kernels, so that passes are padded."""
    path: Path = request.getfixturevalue(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_KERNELS", "plain")  # with EdgeSpec's own, no length need be tried
        # In as little memory as here, layers are worth more than the buffers of long pieces.
        patch.setattr(rows, "best_rows", lambda *_: 512)
        loaded = load_streamed(path, context=CONTEXT, threads=1, kv="q8_0")
    with loaded:
        assert loaded.target.context.n_rows >= 512
        yield loaded


def read(engine: Engine, tokens: list[int], pieces: PrefillChunks | None) -> tuple[bytes, int]:
    """The state of a text read from nothing, and how often the weights were read for that."""
    target = engine.target
    weights = target.model.weights
    assert isinstance(weights, StreamedWeights)
    before, target.pieces = target.pieces, pieces
    try:
        target.rewind(0)
        read_before = weights.read_bytes
        target.prefill(TextSequence(tokens), len(tokens))
        sweeps = (weights.read_bytes - read_before) / weights.streamed_bytes
        return bytes(target.cache.save(0, len(tokens))), round(sweeps)
    finally:
        target.pieces = before


def test_long_pieces_give_the_bits_of_short_ones_in_fewer_sweeps(engine: Engine, tmp_path: Path) -> None:
    tokens = engine.encoder.encode(PROMPT)[:320]
    rule = engine.target.rule
    assert rule is not None
    assert engine.target.pieces is not None, "loading allows them for a streamed model"
    short, sweeps = read(engine, tokens, None)
    assert sweeps >= len(tokens) // rule.maximum
    file = tmp_path / "rows" / "pieces.json"
    pieces = PrefillChunks(rule, engine.target.context.n_rows, file)
    tried, _ = read(engine, tokens, pieces)
    assert tried == short, "whatever the trial found, the text is the same"
    remembered = PrefillChunks(rule, engine.target.context.n_rows, file)
    assert json.loads(file.read_text())
    assert remembered.longest == pieces.longest
    known, fewer = read(engine, tokens, remembered)
    assert known == short
    if remembered.is_proven(remembered.longest):
        assert fewer < sweeps / 2


def test_attention_in_tiles_would_give_other_bits_or_is_not_there(engine: Engine) -> None:
    """Long pieces are exact since attention's kernel is kept: without that the trial must see it."""
    target = engine.target
    tokens = engine.encoder.encode(PROMPT)[:384]
    assert target.rule is not None
    graph = target.context.graph
    (kept,) = [observer for observer in graph.observers if isinstance(observer, RowAttention)]
    graph.remove(kept)
    try:
        target.rewind(0)
        target.cache.append(TokenBatch.run(tokens, 0, target.cache.open_paths), len(tokens))
        tiled = bytes(target.cache.save(0, len(tokens)))
        pieces = PrefillChunks(target.rule, target.context.n_rows)
        _, rows = pieces.next(len(tokens))
        state, _ = read(engine, tokens, pieces)
    finally:
        graph.add(kept)
    short, _ = read(engine, tokens, None)
    assert state == short
    assert pieces.is_proven(rows) is (tiled == short)


def test_a_graph_that_is_used_again_has_its_own_shapes(engine: Engine) -> None:
    """Long and short passes in turn, and the same long one twice: llama.cpp keeps the last graph."""
    tokens = engine.encoder.encode(PROMPT)[:192]
    first, _ = read(engine, tokens, engine.target.pieces)
    again, _ = read(engine, tokens, engine.target.pieces)
    once_more, _ = read(engine, tokens, engine.target.pieces)
    assert first == again == once_more
    answer = engine.generate(tokens, GenerationConfig(max_tokens=4))
    assert len(answer.tokens) > 0


@pytest.mark.slow
def test_own_kernels_give_the_same_bits_for_pieces_of_any_length(gemma_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "best_rows", lambda *_: 512)
        loaded = load_streamed(gemma_path, context=CONTEXT, threads=1)
    with loaded:
        if loaded.target.rule != ANY_ROWS:
            pytest.skip("EdgeSpec's own kernels do not compute everything here")
        tokens = loaded.encoder.encode(PROMPT)[:333]
        found = [read(loaded, tokens, PrefillChunks(RowRule(1, 1, most), most)) for most in (40, 97, 512)]
        assert found[0][0] == found[1][0] == found[2][0]
        assert [sweeps for _, sweeps in found] == [9, 4, 1]
        assert not loaded.target.must_try(333)
