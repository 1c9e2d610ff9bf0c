"""The chunks of the answers to one HTTP request, and the end of a load."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, suppress
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from edgespec import GenerationConfig
from edgespec.api.refusals import ShuttingDown
from edgespec.base.progress import Progress, report_waiting
from edgespec.errors import BackendError
from edgespec.generation.result import Chunk
from edgespec.serving import model_worker
from edgespec.serving.embeddings import EmbeddingWorker
from edgespec.serving.engine_worker import EngineWorker, PendingAnswer, chunks_of
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


def test_a_model_is_unloaded_even_if_no_request_has_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_worker, "_IDLE_S", 0.01)
    closed = threading.Event()
    model: Any = SimpleNamespace(card=None, embedder=None, close=closed.set, cancel=lambda: None)
    model.card = model
    worker = EmbeddingWorker(model, 1, lambda _: model, lambda _: None, keep_alive=0.01)
    assert closed.wait(PATIENCE_S)
    worker.close()


def test_closing_ends_a_load_that_waits_for_a_child_process() -> None:
    begun, never = threading.Event(), threading.Event()

    def reopen(_progress: Progress) -> NoReturn:
        begun.set()
        for _ in range(10_000):
            report_waiting("A child process", 0.0)
            never.wait(0.001)
        raise BackendError("Nobody ended the load.")

    def borrow() -> None:
        with suppress(ShuttingDown), worker.borrowed():
            pass

    card: Any = object()
    worker = EngineWorker(None, 1, reopen, lambda _: None, card=card)
    client = threading.Thread(target=borrow)
    client.start()
    assert begun.wait(PATIENCE_S)
    worker.close()
    client.join()
    assert worker._failure == str(ShuttingDown())
