"""Downloads for clients: a model once, and none keeps others or the end of a server waiting."""

from __future__ import annotations

import asyncio
import threading

from edgespec.api.refusals import Refusal, ShuttingDown
from edgespec.base.progress import Progress
from edgespec.errors import HubError
from edgespec.serving.pulling import Puller, Step


def test_downloads_that_run_and_wait_end_with_the_server() -> None:
    released, begun = threading.Event(), []

    def pull(name: str, _progress: Progress) -> None:
        begun.append(name)
        released.wait()

    async def steps_of(puller: Puller, name: str) -> list[Step]:
        return [step async for step in puller.steps(name)]

    async def run() -> list[list[Step]]:
        puller = Puller(pull)
        clients = [asyncio.create_task(steps_of(puller, name)) for name in "aab"]
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        puller.stop()
        return await asyncio.wait_for(asyncio.gather(*clients), 30)

    try:
        ends = asyncio.run(run())
    finally:
        released.set()
    assert sorted(begun) == ["a", "b"]
    assert all(isinstance(steps[-1], ShuttingDown) for steps in ends)


def test_downloads_of_a_model_take_turns() -> None:
    running: list[str] = []
    most = 0

    def pull(name: str, _progress: Progress) -> None:
        nonlocal most
        running.append(name)
        most = max(most, len(running))
        running.remove(name)

    async def run() -> list[Step]:
        puller = Puller(pull)

        async def last(name: str) -> Step:
            return [step async for step in puller.steps(name)][-1]

        return await asyncio.wait_for(asyncio.gather(*map(last, "aaaaaa")), 30)

    assert asyncio.run(run()) == [{"status": "success"}] * 6
    assert most == 1


def test_a_hub_that_cannot_be_reached_is_no_failure_of_the_server() -> None:
    def pull(_name: str, _progress: Progress) -> None:
        raise HubError("The Hub cannot be reached.")

    async def run() -> list[Step]:
        return [step async for step in Puller(pull).steps("a")]

    last = asyncio.run(run())[-1]
    assert isinstance(last, Refusal)
    assert (last.status, last.message) == (502, "The Hub cannot be reached.")
