"""Observing a context's compute graph: one llama.cpp callback, several observers.

An observer says by its watch where in the graph it is called (`kernels.watch`). The graph stops only where
one of them wants to see what was computed, and Python is entered only where one is called. A context without
observers has no callback.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from edgespec.kernels import ggml
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.ggml import Address
from edgespec.kernels.native.library import STATE_OPERATIONS, StateBranching
from edgespec.kernels.watch import Gate, Watch


class GraphObserver(Protocol):
    """Called at some nodes of the graph while a batch is decoded; its methods do nothing if not overridden.

    If an observer raises, the decode ends and `Context.decode` raises the exception.
    """

    watch: Watch  # at which nodes

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A decode begins.

        Args:
            stop: whether the decode is to be aborted; to be polled during long waits.
            padding: rows at the end of the batch whose results are not used.
        """
        return

    def reached(self, node: Address) -> bool:
        """A node that the watch asks about is to be computed. Returns whether the graph must stop after it.

        Whatever comes after the node that the graph stopped at last is not computed yet.
        """
        return False

    def computed(self, node: Address) -> None:
        """The graph has stopped after this node for this observer: everything up to it has been computed."""
        return

    def end(self, *, completed: bool) -> None:
        """The decode has returned.

        Args:
            completed: no observer raised.
        """
        return


class _MarksBranches(GraphObserver):
    """Shows the nodes to what computes branches of running states, among other observers."""

    def __init__(self, branching: StateBranching) -> None:
        self._branching = branching
        self.watch = Watch()
        for name in STATE_OPERATIONS:
            self.watch.ask_about_operation(ggml.operation_named(name))

    def reached(self, node: Address) -> bool:
        """Show a node."""
        self._branching.reached(node)
        return False


class GraphCallback:
    """The eval callback of one context.

    Args:
        branching: computes branches of running states, and has to know of their nodes, too.
    """

    def __init__(self, observers: Iterable[GraphObserver], branching: StateBranching | None = None) -> None:
        self._observers = list(observers)
        self._branching = branching
        self._error: BaseException | None = None
        self._gate: Gate | None = None

    def install(self, params: Any) -> None:
        """Set the callback in the parameters of a context, if there are observers."""
        if self._observers:
            if self._branching is not None:
                self._observers.append(_MarksBranches(self._branching))
            self._gate = Gate(self._call)
            self._set_watches()
            params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(self._gate.callback)
            params.cb_eval_user_data = self._gate.data
        elif self._branching is not None:
            params.cb_eval = ctypes.cast(self._branching.callback, llama_cpp.ggml_backend_sched_eval_callback)
            params.cb_eval_user_data = self._branching.handle

    @property
    def installed(self) -> bool:
        """True if observers are called."""
        return self._gate is not None

    def add(self, observer: GraphObserver) -> None:
        """Add an observer; only if the callback is installed."""
        self._observers.append(observer)
        self._set_watches()

    def remove(self, observer: GraphObserver) -> None:
        """Call an observer no more."""
        self._observers.remove(observer)
        self._set_watches()

    @property
    def observers(self) -> tuple[GraphObserver, ...]:
        """All that are called."""
        return tuple(self._observers)

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        self._error = None
        if self._gate is not None:
            self._gate.begin()
        for observer in self._observers:
            observer.begin(stop, padding)

    def end(self) -> BaseException | None:
        """The decode has returned. Returns what an observer raised, if any did."""
        error, self._error = self._error, None
        for observer in self._observers:
            observer.end(completed=error is None)
        return error

    def _set_watches(self) -> None:
        if self._gate is not None:
            self._gate.set_watches([observer.watch for observer in self._observers])

    def _call(self, node: Address, number: int, ask: int) -> int:
        """Call an observer; a negative result ends the pass."""
        try:
            if ask:
                return int(self._observers[number].reached(node))
            self._observers[number].computed(node)
            return 1
        except BaseException as error:  # C cannot propagate it
            self._error = error
            return -1
