"""Answers for asynchronous code: the same texts, and nothing is left running when somebody stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from edgespec import GenerationConfig
from edgespec.engine.requests import Event, Request, RequestQueue
from edgespec.errors import BackendError, ContextLengthError
from edgespec.generation.result import Chunk
from edgespec.serving.engine_worker import PendingAnswer, chunks_of
from edgespec.serving.model_worker import QueueSlot
from edgespec.speculation.drafters.base import NoDrafter
from tests.unit.fakes import CONTEXT, fake_engine
from tests.waiting import PATIENCE_S

CONFIG = GenerationConfig(max_tokens=20)
PROMPTS = [[n + 1, n + 2] for n in range(6)]


def requests(*numbers: int) -> list[Request]:
    return [Request(PROMPTS[n], CONFIG, raw=True, key=n) for n in numbers]


def tokens_of(events: list[Event]) -> dict[int, list[int]]:
    return {
        event.request.key: event.chunk.generation.tokens
        for event in events
        if event.chunk is not None and event.chunk.generation is not None
    }


def expected() -> list[list[int]]:
    engine, _ = fake_engine(NoDrafter(), 3, never_ends=True)
    with engine:
        return [answer.tokens for answer in engine.generate_many(PROMPTS, CONFIG, raw=True)]


def test_the_answers_are_those_of_the_ordinary_calls() -> None:
    engine, target = fake_engine(NoDrafter(), 3, never_ends=True)
    told: list[int] = []

    async def main() -> list[list[int]]:
        answers = await engine.generate_many_async(
            PROMPTS, CONFIG, raw=True, on_result=lambda index, _: told.append(index)
        )
        return [answer.tokens for answer in answers]

    with engine:
        assert asyncio.run(main()) == expected()
    assert sorted(told) == list(range(6))
    assert target.shared_passes > 0


def test_tasks_that_ask_at_once_are_all_answered() -> None:
    engine, _ = fake_engine(NoDrafter(), 3, never_ends=True)

    async def ask(number: int) -> list[int]:
        (answer,) = await engine.generate_many_async([PROMPTS[number]], CONFIG, raw=True)
        return answer.tokens

    async def main() -> list[list[int]]:
        return list(await asyncio.gather(*map(ask, range(6))))

    with engine:
        assert asyncio.run(main()) == expected()


def test_who_stops_early_leaves_a_free_engine() -> None:
    engine, target = fake_engine(NoDrafter(), 3, never_ends=True)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def let_the_loop_run() -> None:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()

        target.on_pass = let_the_loop_run  # so that no answer ends before the loop has stopped it
        async with aclosing(engine.stream_many_async(requests(0, 1, 2))) as events:
            async for _ in events:
                break
        passes = target.passes
        target.on_pass = lambda: None
        assert target.sequences == [target.own], "all places are given back"
        assert engine._access._begun_turns() == []
        assert passes < 20

    with engine:
        asyncio.run(main())
        assert engine.generate(PROMPTS[0], CONFIG).tokens == expected()[0]


def test_a_task_that_is_cancelled_ends_its_answers() -> None:
    engine, target = fake_engine(NoDrafter(), 3, never_ends=True)
    begun = asyncio.Event()
    cancelled = threading.Event()

    async def ask() -> None:
        async with aclosing(engine.stream_many_async(requests(0, 1))) as events:
            async for _ in events:
                begun.set()

    async def main() -> None:
        def hold() -> None:  # no answer gets far before the task is cancelled
            if target.passes >= 4:
                assert cancelled.wait(PATIENCE_S)

        target.on_pass = hold
        task = asyncio.create_task(ask())
        await begun.wait()
        task.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert target.sequences == [target.own]
        (answer,) = await engine.generate_many_async([PROMPTS[0]], CONFIG, raw=True)
        assert answer.tokens == expected()[0]

    with engine:
        asyncio.run(main())


def test_who_gives_up_waiting_for_a_turn_does_not_wait() -> None:
    engine, target = fake_engine(NoDrafter(), 3, never_ends=True)

    async def wait_for_turn() -> None:
        await engine.generate_many_async([PROMPTS[1]], CONFIG, raw=True)

    async def main() -> None:
        task = asyncio.create_task(wait_for_turn())
        while engine.waiting == 0:
            await asyncio.sleep(0.001)
        passes = target.passes
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert target.passes == passes

    with engine:
        first = engine.stream(PROMPTS[0], CONFIG)
        next(first)
        asyncio.run(main())
        (*_, last) = first
        assert last.generation is not None
        assert last.generation.tokens == expected()[0]
        assert engine.generate(PROMPTS[2], CONFIG).tokens == expected()[2]


def test_requests_that_come_later_join() -> None:
    engine, _ = fake_engine(NoDrafter(), 3, never_ends=True)
    queue = RequestQueue()
    queue.put(requests(0)[0])

    async def main() -> dict[int, list[int]]:
        events: list[Event] = []
        async with aclosing(engine.stream_many_async(queue)) as stream:
            async for event in stream:
                if not events:
                    queue.put(requests(4)[0])
                    queue.close()
                events.append(event)
        return tokens_of(events)

    with engine:
        assert asyncio.run(main()) == {0: expected()[0], 4: expected()[4]}


def test_who_leaves_an_idle_queue_does_not_wait() -> None:
    engine, _ = fake_engine(NoDrafter(), 3, never_ends=True)
    queue = RequestQueue()
    queue.put(requests(0)[0])

    async def main() -> None:
        async with aclosing(engine.stream_many_async(queue)) as stream:
            async for event in stream:
                if event.is_last:
                    break

    with engine:
        asyncio.run(main())
        assert engine.generate(PROMPTS[0], CONFIG).tokens == expected()[0]


def test_failures_arrive_where_the_answers_would() -> None:
    engine, target = fake_engine(NoDrafter(), 3, never_ends=True)

    def source() -> Iterator[Request]:
        yield requests(0)[0]
        raise OSError("the file is gone")

    async def main() -> None:
        with pytest.raises(ContextLengthError):
            await engine.generate_many_async([[1] * CONTEXT], CONFIG, raw=True)
        with pytest.raises(OSError, match="gone"):
            _ = [event async for event in engine.stream_many_async(source())]
        assert target.sequences == [target.own]

    with engine:
        asyncio.run(main())

    async def closed() -> None:
        with pytest.raises(BackendError, match="closed"):
            await engine.generate_many_async(PROMPTS, CONFIG, raw=True)

    asyncio.run(closed())


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
