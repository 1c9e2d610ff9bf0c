"""Many texts of mixed settings with few cells, and how long a newcomer waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.engine.requests import Request, RequestSource
from tests.company import mixed, together
from tests.integration.test_parallel import SYSTEM, alone
from tests.tiny import write_tiny


@pytest.mark.slow
def test_48_texts_alone_and_in_company(smol_path: Path, tmp_path: Path) -> None:
    """Joins and leaves at random, and so few cells that texts are moved and wait; the model is random.

    With a real one: python -m tests.company.
    """
    model = write_tiny(tmp_path / "tiny.gguf", "llama", smol_path)  # it has no template for messages
    wanted = [
        replace(request, prompt=" ".join(message["content"] for message in request.prompt))
        for request in mixed(48, seed=7)
    ]
    with edgespec.load(model, draft="none", exact=True, context=256, threads=1) as engine:
        expected = alone(engine, wanted)
        outcome = together(engine, wanted, expected, seed=7)
    assert outcome.identical >= 44
    assert outcome.left > 0
    assert outcome.compactions > 0
    assert outcome.set_aside > 0


def chat(number: int, question: str) -> Any:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number}: {question}"}]


def test_a_newcomer_gets_its_first_token_within_two_passes(short_path: Path) -> None:
    """A chat request that arrives while 32 answers are under way: one pass reads it, the next answers."""
    config = GenerationConfig(max_tokens=40)
    batch = [Request(chat(n, "Tell me of your lists."), config, key=n) for n in range(32)]
    newcomer = Request(chat(77, "What is the first on them?"), config, key="new")

    class Source(RequestSource):
        taken_after = 0

        def pop(self) -> Request | None:
            if batch:
                return batch.pop(0)
            if passes and passes[-1] == 32 and not self.taken_after:
                self.taken_after = len(passes)
                return newcomer
            return None

        def wait(self) -> bool:
            return False

    passes: list[int] = []
    source = Source()
    first = 0
    with edgespec.load(short_path, draft="none", exact=True, context=1024, parallel=48, threads=1) as engine:
        events = engine.stream_many(source, on_pass=lambda records: passes.append(len(records)))
        for event in events:
            assert event.error is None
            if event.request is newcomer and not first:
                first = len(passes)
        assert passes[source.taken_after] >= 32, "the others went on meanwhile"
    assert source.taken_after > 0
    assert 1 <= first - source.taken_after <= 2


def test_short_texts_that_have_room_are_answered_at_once(short_path: Path) -> None:
    """Cells are kept free for no more tokens than each text may still get."""
    with edgespec.load(short_path, draft="none", context=32, parallel=8, text_tokens=32) as engine:
        config, in_passes = GenerationConfig(max_tokens=16), []
        requests = [Request([1, *range(100 * n + 5, 100 * n + 20)], config, raw=True) for n in range(8)]
        events = engine.stream_many(
            requests, parallel=8, on_pass=lambda records: in_passes.append(len(records))
        )
        assert all(event.error is None for event in events)
    assert max(in_passes) == 8
