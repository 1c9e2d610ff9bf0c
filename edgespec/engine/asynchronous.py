"""Answers for asynchronous code: the passes run in a thread, and their events arrive on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import closing, suppress

from edgespec.engine.requests import Event, Request, RequestList, RequestQueue, RequestSource

_AHEAD = 256  # events that nobody has taken yet; no pass begins beyond that


class _Stoppable(RequestSource):
    """A source of requests that can be told to end.

    Attributes:
        begun: whether a request was asked for, so that the engine works for this source.
        idle: whether it waits for requests.
        stopped: whether there will be no more.
    """

    def __init__(self, source: RequestSource) -> None:
        self.begun = self.idle = self.stopped = False
        self._source = source
        self._lock = threading.Lock()  # once it is stopped, it does not become idle

    def pop(self) -> Request | None:
        self.begun = True
        return None if self.stopped else self._source.pop()

    def wait(self) -> bool:
        with self._lock:
            if self.stopped:
                return False
            self.idle = True
        more = self._source.wait()
        self.idle = False
        return more and not self.stopped

    def stop(self) -> None:
        """Accept no more requests."""
        with self._lock:
            self.stopped = True
        if isinstance(self._source, RequestQueue):
            self._source.close()


async def events_of_thread(
    answer: Callable[[RequestSource], Generator[Event, None, None]], source: RequestSource | Iterable[Request]
) -> AsyncGenerator[Event, None]:
    """The events of answering requests in a thread.

    When the iteration ends early, the thread ends after the pass that is running, and this waits for it,
    unless the thread itself waits for its turn or for requests.

    Args:
        answer: answers the requests of a source; called and iterated in the thread.

    Raises:
        Exception: whatever `answer` raised.
    """
    requests = _Stoppable(RequestList(source) if isinstance(source, Iterable) else source)
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
    ended = asyncio.Event()
    room = threading.Semaphore(_AHEAD)

    def work() -> None:
        failure: Exception | None = None
        try:
            with closing(answer(requests)) as events:
                for event in events:
                    room.acquire()
                    if requests.stopped:
                        break
                    loop.call_soon_threadsafe(arrived.put_nowait, event)
        except Exception as error:  # whatever it is, whoever iterates gets it
            failure = error
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(arrived.put_nowait, failure)
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name="edgespec-answers", daemon=True).start()
    try:
        while (item := await arrived.get()) is not None:
            if isinstance(item, Exception):
                raise item
            room.release()
            yield item
    finally:
        requests.stop()
        room.release()
        if requests.begun and not requests.idle:
            await ended.wait()
