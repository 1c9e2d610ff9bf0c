"""Long prompts of a streamed model beside other texts: who waits for whom, and what it changes: no bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from edgespec import GenerationConfig
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request
from edgespec.generation.config import Grammar
from edgespec.generation.result import Generation
from edgespec.offload.weights import StreamedWeights
from edgespec.planning.memory import rows
from tests.integration.test_streaming import load_streamed
from tests.tiers import slow_except

LONG = 800
ROWS = 256
CONTEXT = 1024


@pytest.fixture(scope="module", params=slow_except(["q8_0"], ["f16", "q8_0"]))
def engine(request: pytest.FixtureRequest, short_path: Path) -> Iterator[Engine]:
    """With keys and values of either type that EdgeSpec's own kernels read."""
    with pytest.MonkeyPatch.context() as patch:
        # A model this small is read in no time, so small pieces would do.
        patch.setattr(rows, "best_rows", lambda *_: ROWS)
        loaded = load_streamed(short_path, context=CONTEXT, threads=1, kv=request.param)
    with loaded:
        assert loaded.target.context.n_rows == ROWS
        yield loaded


def prompt(engine: Engine, number: int, length: int) -> list[int]:
    """Tokens that begin differently for each number."""
    text = (
        f"Story {number}: " + "The river was high that spring, and nobody crossed it without a reason. " * 200
    )
    return engine.encoder.encode(text, raw=True)[:length]


def sweeps(engine: Engine) -> float:
    weights = engine.target.model.weights
    assert isinstance(weights, StreamedWeights)
    return weights.read_bytes / weights.streamed_bytes


def answers(engine: Engine, wanted: Sequence[Request]) -> dict[str, Generation]:
    found = {}
    for event in engine.stream_many(wanted):
        assert event.error is None
        assert event.chunk is not None
        if event.chunk.generation is not None:
            found[event.request.key] = event.chunk.generation
    return found


def test_an_answer_continues_while_a_long_prompt_is_read(engine: Engine) -> None:
    letters = Grammar("regex", "[a-z ]{2000}")  # so that the answer does not end early
    config = GenerationConfig(max_tokens=60, grammar=letters)
    few = GenerationConfig(max_tokens=3)
    short, long = prompt(engine, 1, 12), prompt(engine, 2, LONG)
    expected = [engine.generate(short, config).tokens, engine.generate(long, few).tokens]
    engine.target.rewind(0)
    answering = Request(short, config, key="answering")
    joining = Request(long, few, key="joining")
    order: list[str] = []
    found: dict[str, Generation] = {}

    def source() -> Iterator[Request]:
        yield answering
        yield joining

    for event in engine.stream_many(source(), parallel=2):
        assert event.chunk is not None
        order.append(event.request.key)
        if event.chunk.generation is not None:
            found[event.request.key] = event.chunk.generation
    first = order.index("joining")
    assert order[:first].count("answering") >= 2, "the answer got tokens while the prompt was read"
    assert order[first:].count("answering") >= 1, "and the prompt did not wait for the answer's end"
    assert [found["answering"].tokens, found["joining"].tokens] == expected


def test_prompts_of_several_requests_share_sweeps(engine: Engine) -> None:
    config = GenerationConfig(max_tokens=1)
    wanted = [Request(prompt(engine, 10 + n, 500), config, key=str(n)) for n in range(3)]
    expected = []
    for request in wanted:
        engine.target.rewind(0)
        expected.append(engine.generate(request.prompt, config).tokens)
    engine.target.rewind(0)
    before = sweeps(engine)
    found = answers(engine, wanted)
    taken = sweeps(engine) - before
    assert [found[str(n)].tokens for n in range(3)] == expected
    longest = engine.target.shared_rows(ROWS)
    assert longest >= 192, "pieces beyond the padded passes of exact decoding are used"
    assert taken <= 3 * 500 / longest + 12, "remainders, and passes that give each text its token"
