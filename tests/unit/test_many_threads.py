"""One engine and several threads: calls wait for one another, or share passes through a queue."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from edgespec import GenerationConfig
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request, RequestQueue
from edgespec.errors import BackendError, UsageError
from edgespec.generation.result import Generation
from edgespec.speculation.drafters.base import NoDrafter
from tests.unit.fakes import FakeDrafter, fake_engine
from tests.waiting import PATIENCE_S, wait_until

CONFIG = GenerationConfig(max_tokens=12)


class Call(threading.Thread):
    """A call in a thread of its own, and what became of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.result: Any = None
        self.error: Exception | None = None
        self._call = call
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error

    def end(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def alone(prompt: list[int], seed: int = 5) -> list[int]:
    engine, _ = fake_engine(NoDrafter(), seed, never_ends=True)
    with engine:
        return engine.generate(prompt, CONFIG).tokens


def test_calls_wait_in_order_and_get_the_texts_that_they_get_alone() -> None:
    engine, _ = fake_engine(FakeDrafter(5, 0.8), 5, never_ends=True)
    order: list[int] = []

    def ask(number: int) -> Generation:
        return engine.generate([number], CONFIG, on_prefill=lambda *_: order.append(number))

    with engine:
        first = engine.stream([20], CONFIG)
        next(first)
        calls = []
        for number in range(1, 6):
            calls.append(Call(lambda number=number: ask(number)))
            wait_until(lambda number=number: engine.waiting == number)
        assert order == [], "the first answer has not ended"
        rest = [chunk for chunk in first if chunk.generation is not None]
        answers = [call.end() for call in calls]
        assert order == [1, 2, 3, 4, 5]
        assert [answer.tokens for answer in answers] == [alone([number]) for number in order]
        assert rest[-1].generation is not None
        assert rest[-1].generation.tokens == alone([20])
        assert engine.waiting == 0


def test_every_kind_of_call_from_many_threads() -> None:
    engine, target = fake_engine(FakeDrafter(5, 0.8), 5, never_ends=True)

    def work(number: int) -> list[list[int]]:
        got = []
        for turn in range(4):
            prompt = [1 + (number + turn) % 20]
            if (number + turn) % 2:
                got.append(engine.generate(prompt, CONFIG).tokens)
            else:
                got += [answer.tokens for answer in engine.generate_many([prompt, [3, 4]], CONFIG)]
        return got

    with engine:
        calls = [Call(lambda number=number: work(number)) for number in range(8)]
        for number, call in enumerate(calls):
            expected = []
            for turn in range(4):
                expected.append(alone([1 + (number + turn) % 20]))
                if (number + turn) % 2 == 0:
                    expected.append(alone([3, 4]))
            assert call.end() == expected
        assert target.sequences == [target.own]


def test_a_thread_does_not_wait_for_itself() -> None:
    engine, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    with engine:
        mine = engine.stream([1], CONFIG)
        next(mine)
        other = Call(lambda: engine.generate([2], CONFIG))
        wait_until(lambda: engine.waiting == 1)
        with pytest.raises(UsageError, match="busy with another answer"):
            engine.generate([3], CONFIG)
        with pytest.raises(UsageError, match="busy with another answer"):
            engine.generate_many([[3]], CONFIG)
        assert engine.waiting == 1, "those that were refused do not wait"
        mine.close()
        assert other.end().tokens == alone([2])


def test_an_answer_that_is_dropped_lets_the_next_one_begin() -> None:
    engine, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    with engine:
        dropped = engine.stream([1], CONFIG)
        next(dropped)
        other = Call(lambda: engine.generate([2], CONFIG))
        wait_until(lambda: engine.waiting == 1)
        del dropped
        gc.collect()
        assert other.end().tokens == alone([2])


def test_a_failing_call_lets_the_next_one_begin() -> None:
    engine, target = fake_engine(NoDrafter(), 5, never_ends=True)

    failures = [OSError("the disk is gone")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    with engine:
        failing = engine.stream([1], CONFIG)
        next(failing)
        other = Call(lambda: engine.generate([2], CONFIG))
        wait_until(lambda: engine.waiting == 1)
        target.on_pass = fail
        with pytest.raises(OSError, match="gone"):
            next(failing)
        assert other.end().tokens == alone([2])


def test_closing_ends_those_that_wait() -> None:
    engine, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    first = engine.stream([1], CONFIG)
    next(first)
    calls = [Call(lambda: engine.generate([2], CONFIG)) for _ in range(3)]
    wait_until(lambda: engine.waiting == 3)
    engine.close()
    for call in calls:
        with pytest.raises(BackendError, match="closed"):
            call.end()


def test_threads_share_passes_through_a_queue() -> None:
    engine, target = fake_engine(NoDrafter(), 5, never_ends=True)
    queue = RequestQueue()
    answers: dict[int, list[int]] = {}

    def answer(engine: Engine) -> None:
        for event in engine.stream_many(queue):
            if event.chunk is not None and event.chunk.generation is not None:
                answers[event.request.key] = event.chunk.generation.tokens

    with engine:
        answering = Call(lambda: answer(engine))
        asking = [
            Call(lambda number=number: queue.put(Request([number], CONFIG, raw=True, key=number)))
            for number in range(1, 7)
        ]
        for call in asking:
            call.end()
        wait_until(lambda: len(answers) == 6)
        assert answering.is_alive(), "there may be more"
        queue.put(Request([7], CONFIG, raw=True, key=7))
        queue.close()
        answering.end()
        assert answers == {number: alone([number]) for number in range(1, 8)}
        with pytest.raises(UsageError, match="closed"):
            queue.put(Request([8]))
    assert target.sequences == [target.own]


def test_cancelling_ends_a_call_that_waits_for_requests() -> None:
    engine, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    queue = RequestQueue()
    with engine:
        answering = Call(lambda: list(engine.stream_many(queue)))
        queue.put(Request([1], CONFIG, raw=True))
        wait_until(lambda: engine.last_generation is not None and bool(reason(engine.last_generation)))
        engine.cancel()
        answering.end()
        queue.put(Request([2], CONFIG, raw=True))
        queue.close()
        assert [event.request.prompt for event in engine.stream_many(queue) if event.is_last] == [[2]]


def test_what_is_in_the_queue_shares_every_pass() -> None:
    engine, target = fake_engine(NoDrafter(), 5, never_ends=True)
    queue = RequestQueue()
    for number in range(4):
        queue.put(Request([number + 1], CONFIG, raw=True, key=number))
    queue.close()
    with engine:
        ended = [event.request.key for event in engine.stream_many(queue) if event.is_last]
    assert sorted(ended) == [0, 1, 2, 3]
    assert target.passes == target.shared_passes == 12


def reason(answer: Generation) -> str:
    return answer.finish_reason


def test_an_answer_that_nobody_has_iterated_over_yet_can_be_cancelled() -> None:
    engine, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    with engine:
        stream = engine.stream([1], CONFIG)
        engine.cancel()
        (last,) = stream
        assert last.generation is not None
        assert (reason(last.generation), last.generation.tokens) == ("cancelled", [])
        assert engine.generate([1], CONFIG).tokens == alone([1])


def test_cancelling_between_the_start_and_the_first_token_is_not_lost() -> None:
    engine, target = fake_engine(NoDrafter(), 5, never_ends=True)
    with engine:
        for cancel in (lambda *_: engine.cancel(), lambda *_: Call(engine.cancel).end()):
            answer = engine.generate([1, 2, 3], CONFIG, on_prefill=cancel)
            assert reason(answer) == "cancelled"
            assert len(answer.tokens) <= 1
            assert engine.generate([1], CONFIG).tokens == alone([1])
        passes = target.passes
        many = engine.stream_many([Request([1], CONFIG)])
        engine.cancel()
        assert list(many) == []
        assert target.passes == passes


def test_cancelling_ends_calls_that_wait_and_none_that_come_later() -> None:
    engine, _ = fake_engine(FakeDrafter(5, 0.8), 5, never_ends=True)
    with engine:
        first = engine.stream([20], CONFIG)
        next(first)
        calls = [Call(lambda number=number: engine.generate([number], CONFIG)) for number in (1, 2)]
        wait_until(lambda: engine.waiting == 2)
        engine.cancel()
        later = Call(lambda: engine.generate([3], CONFIG))
        wait_until(lambda: engine.waiting == 3)
        *_, last = first
        assert last.generation is not None
        assert reason(last.generation) == "cancelled"
        assert [(reason(call.end()), call.end().tokens) for call in calls] == [("cancelled", [])] * 2
        assert later.end().tokens == alone([3])


def test_cancelling_when_nothing_runs_cancels_nothing_later() -> None:
    engine, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    with engine:
        engine.cancel()
        assert engine.generate([1], CONFIG).tokens == alone([1])
        finished, dropped = engine.stream([2], CONFIG), engine.stream([3], CONFIG)
        list(finished)
        del dropped
        engine.cancel()
        assert len(list(engine.stream_many([Request([1], CONFIG)]))) == CONFIG.max_tokens + 1
