"""Assign requests to workers: each takes what it has room for, and gets what others lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgespec.engine.requests import Request, RequestSource

MAX_LOSSES = 3
"""Workers that may end while they have a request. It may be what ends them, so it is then given up."""

Worker = TypeVar("Worker")


@dataclass(eq=False)
class ClusterTask:
    """A request that is to be answered.

    Attributes:
        number: counts from 0.
        losses: how many workers ended while they had it.
        told: the worker was told that nobody wants the answer any more.
    """

    number: int
    request: Request
    losses: int = 0
    told: bool = False


@dataclass
class _WorkerLoad:
    room: int
    tasks: dict[ClusterTask, None] = field(default_factory=dict)


class Dispatch(Generic[Worker]):
    """Hands tasks to workers, each of which has several at a time.

    A task belongs to at most one worker. What a worker returns that it no longer has, because it was taken
    for lost meanwhile, does not count.
    """

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        self._loads: dict[Worker, _WorkerLoad] = {}
        self._waiting: deque[ClusterTask] = deque()
        self._numbers = 0

    def join(self, worker: Worker, room: int) -> None:
        """Give a worker tasks from now on.

        Args:
            room: most tasks it has at a time.
        """
        self._loads[worker] = _WorkerLoad(room)

    def next(self) -> tuple[Worker, ClusterTask] | None:
        """The next task, and the worker that is given it; None if nobody has room or there is no task now."""
        free = [worker for worker, load in self._loads.items() if len(load.tasks) < load.room]
        if not free:
            return None
        task = self._next_task()
        if task is None:
            return None
        worker = min(free, key=lambda each: len(self._loads[each].tasks) / self._loads[each].room)
        self._loads[worker].tasks[task] = None
        return worker, task

    def done(self, worker: Worker, task: ClusterTask) -> bool:
        """Note that a worker finished a task; False if that task is not the worker's."""
        load = self._loads.get(worker)
        if load is None or task not in load.tasks:
            return False
        del load.tasks[task]
        return True

    def leave(self, worker: Worker) -> tuple[list[ClusterTask], list[ClusterTask]]:
        """Take all tasks from a worker that is lost.

        Returns:
            Those that others will be given, and those that are given up.
        """
        load = self._loads.pop(worker, _WorkerLoad(0))
        for task in load.tasks:
            task.losses += 1
            task.told = False
        again = [task for task in load.tasks if task.losses < MAX_LOSSES]
        self._waiting.extend(again)
        return again, [task for task in load.tasks if task.losses >= MAX_LOSSES]

    def unwanted(self) -> list[tuple[Worker, ClusterTask]]:
        """Tasks whose answers nobody wants any more, and of which the worker was not told yet."""
        found = [
            (worker, task)
            for worker, load in self._loads.items()
            for task in load.tasks
            if task.request.cancelled and not task.told
        ]
        for _, task in found:
            task.told = True
        return found

    @property
    def open(self) -> list[ClusterTask]:
        """The tasks that were begun and are not finished, in the order in which they came."""
        having = [task for load in self._loads.values() for task in load.tasks]
        return sorted([*having, *self._waiting], key=lambda task: task.number)

    def fetch(self) -> bool:
        """True if a task waits for a worker, after having taken one if there is one now."""
        if not self._waiting and (task := self._next_task()) is not None:
            self._waiting.append(task)
        return bool(self._waiting)

    @property
    def busy(self) -> bool:
        """True if a worker has a task."""
        return any(load.tasks for load in self._loads.values())

    def _next_task(self) -> ClusterTask | None:
        if self._waiting:
            return self._waiting.popleft()
        request = self._source.pop()
        if request is None:
            return None
        self._numbers += 1
        return ClusterTask(self._numbers - 1, request)
