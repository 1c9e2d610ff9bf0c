"""Downloads for clients: one after another, and none keeps a server from ending."""

from __future__ import annotations

import asyncio
import threading

from edgespec.api.refusals import ShuttingDown
from edgespec.base.progress import Progress
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
        clients = [asyncio.create_task(steps_of(puller, name)) for name in "abc"]
        while not begun:
            await asyncio.sleep(0.001)
        puller.stop()
        return await asyncio.wait_for(asyncio.gather(*clients), 30)

    try:
        ends = asyncio.run(run())
    finally:
        released.set()
    assert begun == ["a"]
    assert all(isinstance(steps[-1], ShuttingDown) for steps in ends)


def test_downloads_take_turns() -> None:
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

        return await asyncio.wait_for(asyncio.gather(*map(last, "abcdef")), 30)

    assert asyncio.run(run()) == [{"status": "success"}] * 6
    assert most == 1
