"""One engine, one thread, and a queue of limited length in front of it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from edgespec.encoding import Prompt
from edgespec.engine import Engine
from edgespec.generation import Chunk, GenerationConfig


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(eq=False)
class Task:
    """One answer that somebody waits for.

    Attributes:
        cancelled: nobody waits any more.
    """

    prompt: Prompt
    config: GenerationConfig
    raw: bool
    events: asyncio.Queue[Chunk | Exception | None] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    cancelled: bool = False

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The answer as it comes; raises what the engine raised."""
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def tell(self, event: Chunk | Exception | None) -> None:
        """Hand something to whoever waits; called by the worker's thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the server is gone
            self.cancelled = True


class Worker:
    """Answers one request after the other, in the order they came.

    Args:
        waiting: most requests in the queue, besides the one being answered.
    """

    def __init__(self, engine: Engine, waiting: int) -> None:
        self._engine = engine
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._most = waiting + 1
        self._open = 0  # waiting or being answered
        self._lock = threading.Lock()
        self._running: Task | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Put a request into the queue.

        Raises:
            QueueFull: it has no room.
        """
        with self._lock:
            if self._open >= self._most:
                raise QueueFull
            self._open += 1
        self._tasks.put(task)

    def cancel(self, task: Task) -> None:
        """Nobody waits for this one any more; what runs for it ends within a moment."""
        with self._lock:
            task.cancelled = True
            if task is self._running:
                self._engine.cancel()

    def close(self) -> None:
        """End what runs, and the thread; what still waits is not answered."""
        with self._lock:
            if self._running is not None:
                self._running.cancelled = True
                self._engine.cancel()
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            with self._lock:
                self._running = task
            try:
                self._answer(task)
            except Exception as error:
                task.tell(error)
            else:
                task.tell(None)
            finally:
                with self._lock:
                    self._running = None
                    self._open -= 1

    def _answer(self, task: Task) -> None:
        if task.cancelled:
            return

        def stop_if_cancelled(_done: int, _total: int) -> None:
            # A call for an end may have come before the answer began, which forgets earlier ones.
            if task.cancelled:
                self._engine.cancel()

        answer = self._engine.stream(task.prompt, task.config, raw=task.raw, on_prefill=stop_if_cancelled)
        for chunk in answer:
            if task.cancelled:
                self._engine.cancel()
            task.tell(chunk)
