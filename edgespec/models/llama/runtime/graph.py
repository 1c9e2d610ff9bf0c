"""Observing a context's compute graph: one llama.cpp callback, several observers.

llama.cpp calls its eval callback for every node before it computes a run of nodes. Where the callback returns
true, it computes up to and including that node, calls again, and goes on. A context has one such callback.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import llama_cpp

from edgespec.kernels.ggml import Address
from edgespec.kernels.native.library import Branching


class GraphObserver(Protocol):
    """Called for every graph node while a batch is decoded.

    If an observer raises, the decode ends and `Context.decode` raises the exception.
    """

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A decode begins.

        Args:
            stop: whether the decode is to be aborted; to be polled during long waits.
            padding: rows at the end of the batch whose results are not used.
        """
        ...

    def reached(self, node: Address) -> bool:
        """A node is about to be computed. Returns whether the graph must stop after it."""
        ...

    def computed(self) -> None:
        """The graph has stopped: the node that was reached last has been computed."""
        ...

    def end(self, *, completed: bool) -> None:
        """The decode has returned.

        Args:
            completed: no observer raised.
        """
        ...


class _MarksBranches:
    """Shows the nodes to what computes branches of running states, among other observers."""

    def __init__(self, branching: Branching) -> None:
        self._branching = branching

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A decode begins."""

    def reached(self, node: Address) -> bool:
        """Show a node."""
        self._branching.reached(node)
        return False

    def computed(self) -> None:
        """Nothing to do: the graph is never stopped for this."""

    def end(self, *, completed: bool) -> None:
        """The decode has returned."""


class GraphCallback:
    """The eval callback of one context.

    Each call takes about a microsecond, so a context without observers has no callback in Python.

    Args:
        branching: computes branches of running states, and has to know all nodes, too.
    """

    def __init__(self, observers: Iterable[GraphObserver], branching: Branching | None = None) -> None:
        self._observers = list(observers)
        self._branching = branching
        self._error: BaseException | None = None
        self._callback: Any = None

    def install(self, params: Any) -> None:
        """Set the callback in the parameters of a context, if there are observers."""
        if self._observers:
            if self._branching is not None:
                self._observers.append(_MarksBranches(self._branching))
            self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
            params.cb_eval = self._callback
        elif self._branching is not None:
            params.cb_eval = ctypes.cast(self._branching.callback, llama_cpp.ggml_backend_sched_eval_callback)
            params.cb_eval_user_data = self._branching.handle

    @property
    def installed(self) -> bool:
        """Whether observers are called."""
        return self._callback is not None

    def add(self, observer: GraphObserver) -> None:
        """Add an observer; only if the callback is installed."""
        self._observers.append(observer)

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A decode begins."""
        self._error = None
        for observer in self._observers:
            observer.begin(stop, padding)

    def end(self) -> BaseException | None:
        """The decode has returned. Returns what an observer raised, if any did."""
        error, self._error = self._error, None
        for observer in self._observers:
            observer.end(completed=error is None)
        return error

    def _on_node(self, node: Address, ask: bool, _data: object) -> bool:
        try:
            if self._error is not None:
                return ask  # stop here, and go no further
            stop = False
            if ask:
                for observer in self._observers:
                    stop = observer.reached(node) or stop
                return stop
            for observer in self._observers:
                observer.computed()
            return True
        except BaseException as error:  # C cannot propagate it
            self._error = error
            return ask
