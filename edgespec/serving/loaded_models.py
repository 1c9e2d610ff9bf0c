"""Keeps as many models of a server in memory as fit; the least recently used leave for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect

from edgespec.api.completion_request import is_pattern, names_model
from edgespec.api.refusals import QueueFull, Refusal, ShuttingDown
from edgespec.serving.app import Application


@dataclass(eq=False)
class OfferedModel:
    """A model that a server offers; it is set up for its first request."""

    names: tuple[str, ...]  # its name, and aliases, which may be patterns
    needs: int  # bytes that it takes, about; better known when it is set up
    open: Callable[[OfferedModel], Application]  # sets it up without loading it; may take seconds
    path: Path | None = None  # its first file
    memory: int | None = None  # bytes that it may take when it is loaded next; None for what the server may
    app: Application | None = field(default=None, init=False)
    users: int = field(default=0, init=False)  # requests that are being answered
    in_memory: bool = field(default=False, init=False)  # or to be loaded by the requests it has
    leaving: bool = field(default=False, init=False)
    used_at: float = field(default=0.0, init=False)

    def also_named(self, name: str) -> None:
        """Let clients ask for it by another name, too."""
        self.names = (*self.names, name)
        if self.app is not None:
            self.app.handler.names = (*self.app.handler.names, name)

    @property
    def listed(self) -> list[str]:
        """The names that clients are shown."""
        return [name for name in self.names if not is_pattern(name)]

    @property
    def is_loaded(self) -> bool:
        """True if it takes memory now."""
        return self.app is not None and self.in_memory and not self.app.handler.worker.asleep

    @property
    def admits(self) -> bool:
        """True if requests for it need not wait for memory."""
        return self.in_memory and not self.leaving


class LoadedModels:
    """Decides which models are in memory, and in which order requests get to them.

    Requests for models that are in memory do not wait. The others form one line: for the first of them,
    models leave, the least recently used first, until its model fits; all requests of that model follow at
    once. A model that is to leave ends the answers that have begun, and new requests for it join the line.
    So no model keeps others waiting.

    Args:
        budget: bytes that all models may take together.
        waiting: most requests in the line.
    """

    def __init__(self, models: Sequence[OfferedModel], budget: int, waiting: int) -> None:
        self.models = list(models)
        self._budget = budget
        self._most = waiting
        self._line: list[tuple[OfferedModel, asyncio.Future[None]]] = []
        self._idle = asyncio.Condition()
        self._switch: asyncio.Task[None] | None = None

    def offers(self, name: str) -> bool:
        return any(names_model(name, model.names) for model in self.models)

    def named(self, name: str) -> OfferedModel:
        """The model of a name; the first one for none.

        Raises:
            Refusal: no model has this name.
        """
        if not name:
            return self.models[0]
        for model in self.models:
            if names_model(name, model.names):
                return model
        there = ", ".join(name for model in self.models for name in model.listed)
        raise Refusal(404, f"There is no model {name[:80]!r} here. There are: {there}.", "model_not_found")

    @asynccontextmanager
    async def turn(
        self, model: OfferedModel, until_gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """Wait until a model may be in memory; it stays there for the length of the block.

        Args:
            until_gone: returns when the client disconnects.

        Raises:
            QueueFull: too many requests wait.
            ClientDisconnect: the client did not wait so long.
            ShuttingDown: the server ends.
        """
        if model.admits:
            model.users += 1
        else:
            if len(self._line) >= self._most:
                raise QueueFull
            await self._admission(model, until_gone)
        try:
            yield
        finally:
            await self._left(model)

    def stop(self) -> None:
        """Refuse the requests that wait."""
        for _, admitted in self._line:
            if not admitted.done():
                admitted.set_exception(ShuttingDown())

    async def _admission(
        self, model: OfferedModel, until_gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Wait in the line."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone = asyncio.create_task(until_gone())
        self._line.append((model, admitted))
        self._advance()
        try:
            await asyncio.wait({admitted, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not admitted.done():
                raise ClientDisconnect
            admitted.result()
        except asyncio.CancelledError:
            if admitted.done():  # in the same moment
                await self._left(model)
            raise
        finally:
            admitted.cancel()
            self._line = [place for place in self._line if place[1] is not admitted]
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _left(self, model: OfferedModel) -> None:
        async with self._idle:
            model.users -= 1
            model.used_at = time.perf_counter()  # monotonic has ticks of 16 ms on Windows
            self._idle.notify_all()

    def _advance(self) -> None:
        """Admit requests whose models are in memory, and make room for the first of the others."""
        waiting = self._line
        self._line = []
        for model, admitted in waiting:
            if admitted.done():
                continue
            if model.admits:
                model.users += 1
                admitted.set_result(None)
            else:
                self._line.append((model, admitted))
        if self._line and self._switch is None:
            self._switch = asyncio.create_task(self._make_room(self._line[0][0]))

    async def _make_room(self, model: OfferedModel) -> None:
        """Have models leave until this one fits beside the others, or is alone."""
        try:
            there = sorted(
                (other for other in self.models if other.in_memory), key=lambda other: other.used_at
            )
            while there and sum(other.needs for other in there) + model.needs > self._budget:
                leaving = next((other for other in there if not other.users), there[0])
                there.remove(leaving)
                await self._unload(leaving)
            taken = sum(other.needs for other in there)
            model.memory = self._budget - taken if taken else None
            model.in_memory = True
        finally:
            self._switch = None
            self._advance()

    async def _unload(self, model: OfferedModel) -> None:
        model.leaving = True
        try:
            async with self._idle:
                await self._idle.wait_for(lambda: not model.users)
            if model.app is not None:
                await asyncio.to_thread(model.app.handler.worker.unload)
        finally:
            model.leaving, model.in_memory = False, False
