"""The chunks of the answers to one HTTP request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from edgespec import GenerationConfig
from edgespec.errors import BackendError
from edgespec.generation.result import Chunk
from edgespec.serving.engine_worker import PendingAnswer, chunks_of
from edgespec.serving.model_worker import QueueSlot
from tests.waiting import PATIENCE_S

CONFIG = GenerationConfig(max_tokens=20)


def pending_answers(n_answers: int) -> list[PendingAnswer]:
    slot = QueueSlot(lambda: None)
    return [PendingAnswer(tokens=[1], config=CONFIG, slot=slot) for _ in range(n_answers)]


def test_the_answers_to_one_request_come_side_by_side() -> None:
    async def follow() -> list[tuple[int, str]]:
        answers = pending_answers(3)
        told = []
        async with aclosing(chunks_of(answers)) as chunks:
            for place, text in [(2, "a"), (0, "b"), (2, "c"), (1, "d")]:
                answers[place].deliver(Chunk(text=text, tokens=(1,)))
                index, chunk = await anext(chunks)
                told.append((index, getattr(chunk, "text", "")))
            for answer in answers:
                answer.deliver(None)
            assert [item async for item in chunks] == []
        return told

    told = asyncio.run(asyncio.wait_for(follow(), PATIENCE_S))
    assert told == [(2, "a"), (0, "b"), (2, "c"), (1, "d")]


@pytest.mark.parametrize("n_answers", [1, 3])
def test_a_failure_of_one_answer_ends_all_and_leaves_no_task(n_answers: int) -> None:
    async def follow() -> None:
        answers = pending_answers(n_answers)
        answers[-1].deliver(BackendError("It failed."))
        with pytest.raises(BackendError, match="It failed"):
            async for _ in chunks_of(answers):
                pass
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(follow())
