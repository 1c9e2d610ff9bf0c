"""Watching a context's compute graph: one callback of llama.cpp, several observers.

llama.cpp asks about every node before it computes a run of nodes. Where the answer is yes, it computes up to
and including that node, tells so, and goes on. It has room for one such callback a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import llama_cpp

from edgespec.kernels.ggml import Address


class GraphObserver(Protocol):
    """What is told of every node while a batch is decoded.

    An exception that an observer raises ends the decode, and `Context.decode` raises it.
    """

    def begin(self, stop: Callable[[], bool]) -> None:
        """A decode begins.

        Args:
            stop: whether the decode has been told to end early; to be asked during long waits.
        """
        ...

    def reached(self, node: Address) -> bool:
        """A node is about to be computed; whether the graph must stop behind it."""
        ...

    def computed(self) -> None:
        """The graph has stopped: the node that was reached last is computed."""
        ...

    def end(self, *, completed: bool) -> None:
        """The decode has returned.

        Args:
            completed: no observer raised.
        """
        ...


class GraphCallback:
    """The eval callback of one context.

    Asking costs a microsecond a node, so a context without observers does without it.
    """

    def __init__(self, observers: Iterable[GraphObserver]) -> None:
        self._observers = list(observers)
        self._error: BaseException | None = None
        self._callback: Any = None

    def install(self, params: Any) -> None:
        """Have a context that is created with these parameters call this, if there are observers."""
        if self._observers:
            self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
            params.cb_eval = self._callback

    @property
    def installed(self) -> bool:
        """Whether observers are called."""
        return self._callback is not None

    def add(self, observer: GraphObserver) -> None:
        """Let one more observer in; only where the callback is installed."""
        self._observers.append(observer)

    def begin(self, stop: Callable[[], bool]) -> None:
        """A decode begins."""
        self._error = None
        for observer in self._observers:
            observer.begin(stop)

    def end(self) -> BaseException | None:
        """The decode has returned; what an observer raised, if any did."""
        error, self._error = self._error, None
        for observer in self._observers:
            observer.end(completed=error is None)
        return error

    def _on_node(self, node: Address, ask: bool, _data: object) -> bool:
        try:
            if self._error is not None:
                return ask  # stop here, and go no further
            if ask:
                return self._reached(node)
            for observer in self._observers:
                observer.computed()
            return True
        except BaseException as error:  # C cannot pass it on
            self._error = error
            return ask

    def _reached(self, node: Address) -> bool:
        stop = False
        for observer in self._observers:
            stop = observer.reached(node) or stop
        return stop
