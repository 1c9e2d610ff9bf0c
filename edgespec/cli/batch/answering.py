"""The answers to a batch's requests as they come, whatever fails among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from edgespec.cli.interrupt import Interruption
from edgespec.engine.requests import Event, Request, RequestList, RequestSource
from edgespec.errors import EdgeSpecError

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

FATAL = (EdgeSpecError, OSError, MemoryError)
"""What an engine raises when it can answer nothing any more. The failure of a single request is an event."""


class BatchRequests(RequestSource):
    """The requests of a batch; nothing is read ahead of what can be answered.

    Attributes:
        in_flight: requests that were taken and are not done.
    """

    def __init__(self, requests: Iterator[Request | None], wait: Callable[[], bool]) -> None:
        self.in_flight: dict[Request, None] = {}
        self._requests = requests
        self._wait = wait
        self._again: deque[Request] = deque()

    def repeat(self) -> None:
        """Return the unfinished requests again, before all others."""
        self._again.extend(self.in_flight)
        self.in_flight.clear()

    def pop(self) -> Request | None:
        request = self._again.popleft() if self._again else next(self._requests)
        if request is not None:
            self.in_flight[request] = None
        return request

    def wait(self) -> bool:
        return self._wait()

    def watched(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, and note which requests they end."""
        for event in events:
            if event.is_last:
                self.in_flight.pop(event.request, None)
            yield event


def answer_all(
    requests: BatchRequests, engine: Engine, *, parallel: int | None, interruption: Interruption
) -> Iterator[Event]:
    """Answer all requests.

    A bug may end a pass that serves many answers. They are then begun again, one at a time, so that only the
    answer fails in which the bug shows.

    Raises:
        EdgeSpecError, OSError, MemoryError: no request can be answered any more.
    """
    while not interruption:
        try:
            events = engine.stream_many(requests, parallel=parallel)
            yield from requests.watched(interruption.reach(events, engine))
            return
        except FATAL:
            raise
        except Exception as error:
            if not requests.in_flight:
                raise
            bug = error
        suspects = list(requests.in_flight)
        if len(suspects) == 1:
            yield from requests.watched([Event(suspects[0], error=bug)])
            continue
        for request in suspects:
            try:
                events = engine.stream_many(RequestList([request]))
                yield from requests.watched(interruption.reach(events, engine))
            except FATAL:
                raise
            except Exception as error:
                yield from requests.watched([Event(request, error=error)])
            if interruption:
                return


def explained(error: Exception) -> EdgeSpecError:
    """The error for people: as it is, or the bug that it is."""
    if isinstance(error, EdgeSpecError):
        return error
    return EdgeSpecError(f"This is a bug in EdgeSpec: {type(error).__name__}: {error}")
