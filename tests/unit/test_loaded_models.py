"""Which of several models are in memory: within the budget, and in order, whatever comes when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from edgespec.api.refusals import QueueFull, Refusal, ShuttingDown
from edgespec.serving.app import Application
from edgespec.serving.loaded_models import LoadedModels, OfferedModel

_BUDGET = 10


def _open(_model: OfferedModel) -> Application:
    raise AssertionError("nothing is set up here")


def _models(*needs: int) -> list[OfferedModel]:
    return [
        OfferedModel((f"m{number}", f"other-{number}-*"), size, _open) for number, size in enumerate(needs)
    ]


async def _stays() -> None:
    await asyncio.Event().wait()


async def _leaves() -> None:
    return


def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=24))
def test_models_stay_within_the_budget_and_every_request_gets_its_turn(
    requests: list[tuple[int, int, bool]],
) -> None:
    async def work() -> None:
        models = _models(4, 5, 6, 20)
        loaded = LoadedModels(models, _BUDGET, waiting=100)
        answered: list[int] = []

        async def ask(number: int, steps: int, patient: bool) -> None:
            model = models[number]
            try:
                async with loaded.turn(model, _stays if patient else _leaves):
                    for _ in range(steps + 1):
                        there = [other for other in models if other.in_memory]
                        assert model in there
                        assert sum(other.needs for other in there) <= _BUDGET or there == [model]
                        await asyncio.sleep(0)
            except ClientDisconnect:
                assert not patient
            answered.append(number)

        await asyncio.gather(*(ask(*request) for request in requests))
        assert len(answered) == len(requests)
        assert not any(model.users for model in models)

    _run(work)


def test_requests_that_come_later_do_not_keep_others_waiting() -> None:
    async def work() -> None:
        first, second = models = _models(6, 6)
        loaded = LoadedModels(models, _BUDGET, waiting=10)
        order: list[str] = []

        async def ask(model: OfferedModel, name: str) -> None:
            async with loaded.turn(model, _stays):
                order.append(name)
                await asyncio.sleep(0.01)

        asked = []
        for model, name in ((first, "a"), (second, "b"), (first, "c"), (second, "d"), (first, "e")):
            asked.append(asyncio.create_task(ask(model, name)))
            await asyncio.sleep(0)
        await asyncio.gather(*asked)
        assert order == ["a", "b", "d", "c", "e"], "those of a model in memory follow at once, once"

    _run(work)


def test_the_least_recently_used_model_leaves() -> None:
    async def work() -> None:
        models = _models(4, 4, 4)
        loaded = LoadedModels(models, _BUDGET, waiting=10)
        for number in (0, 1, 0, 2):
            async with loaded.turn(models[number], _stays):
                pass
        assert [model.in_memory for model in models] == [True, False, True]
        assert models[2].memory == _BUDGET - 4, "beside the one that stayed"

    _run(work)


def test_the_line_is_bounded_and_ends_with_the_server() -> None:
    async def work() -> None:
        first, second = models = _models(6, 6)
        loaded = LoadedModels(models, _BUDGET, waiting=1)

        async def ask() -> None:
            async with loaded.turn(second, _stays):
                raise AssertionError("it waits")

        async with loaded.turn(first, _stays):
            waits = asyncio.create_task(ask())
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await ask()
            loaded.stop()
            with pytest.raises(ShuttingDown):
                await waits

    _run(work)


def test_names_are_those_of_models_or_refused() -> None:
    first, second = models = _models(1, 1)
    loaded = LoadedModels(models, _BUDGET, waiting=1)
    assert loaded.named("") is first
    assert loaded.named("m1") is loaded.named("m1:latest") is loaded.named("other-1-x") is second
    with pytest.raises(Refusal, match="There are: m0, m1"):
        loaded.named("m2")
