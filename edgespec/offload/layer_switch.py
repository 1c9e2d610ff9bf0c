"""Handing layers over while a graph is computed.

llama.cpp asks about every node before it computes a run of nodes, and where the answer is yes, it stops
behind that node and tells. The rule needs no names of any architecture: a node belongs to the layer
whose weights it reads. The first time a graph of some shape is met, it is stopped behind the first node
that reads a layer's weights, which therefore must be there before; from then on one node earlier, so
that a layer is computed while the next one is on its way. A node whose weights are not there is never
computed: what was learned may be wrong, and costs time then, not truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llama_cpp

from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.offload.attention import RowAttention
from edgespec.offload.ring import LayerRing

_VIEW, _VIEW_OFFSET, _NAME = 10, 11, 13  # behind the ten sources
_FAR = 8  # nodes between a layer's last use and the next streamed layer that make it worth a stop


@dataclass(frozen=True)
class _Stop:
    """A place in the graph: behind the node `name`, one layer goes and another comes."""

    name: bytes
    leave: int | None
    enter: int | None


class HandOver:
    """The eval callback of a context.

    Args:
        tensors: layer to its tensors' addresses and offsets in the slot.

    Attributes:
        attention: keeps attention's rounding from depending on the rows of a pass; None leaves it alone.
        error: what went wrong in the callback, which C cannot pass on.
    """

    def __init__(self, ring: LayerRing, tensors: Mapping[int, Mapping[Address, int]]) -> None:
        self._ring = ring
        self._tensors = tensors
        self._layer_of = {tensor: layer for layer, places in tensors.items() for tensor in places}
        self._known = frozenset(self._layer_of)
        self._stops: dict[int, _Stop] = {}
        self._stop_asked: Callable[[], bool] = lambda: False
        self.attention: RowAttention | None = None
        self.error: BaseException | None = None
        self._begin()
        callback = llama_cpp.ggml_backend_sched_eval_callback
        self.callback: Any = callback(self._on_node)

    def start(self, stop: Callable[[], bool]) -> None:
        """A pass begins.

        Args:
            stop: whether it shall end early.
        """
        self._stop_asked = stop
        self.error = None
        self._begin()

    def end(self) -> BaseException | None:
        """The pass is over; what went wrong in it, if anything."""
        self._ring.restart()
        if self.attention is not None:
            self.attention.end()
        if self.error is None:
            self._learn_exits()
        return self.error

    def _begin(self) -> None:
        self._at = -1
        self._previous = b""
        self._current: int | None = None
        self._leaving: int | None = None
        self._slot: Address = 0
        self._gone: set[int] = set()
        self._last_use: dict[int, tuple[int, bytes]] = {}

    def _on_node(self, node: Address, ask: bool, _data: object) -> bool:
        try:
            if self.error is not None:
                return ask  # stop here, and go no further
            if ask:
                return self._asked(node)
            self._done()
            return True
        except BaseException as error:
            self.error = error
            return ask

    def _asked(self, node: Address) -> bool:
        """Whether the graph shall stop behind this node."""
        self._at += 1
        if self.attention is not None:
            self.attention.on_node(node)
        fields = ggml.read_node(node)
        name: bytes = fields[_NAME]
        stop = self._stops.get(self._at)
        wanted = stop is not None and stop.name == name
        if not self._known.isdisjoint(fields[: _VIEW + 1]):
            for source in fields[: _VIEW + 1]:
                layer = self._layer_of.get(source)
                if layer is not None:
                    wanted = self._used(layer, name) or wanted
            if fields[_VIEW] in self._known:
                # A view's address was fixed when the graph was laid out.
                place = self._tensors[self._layer_of[fields[_VIEW]]][fields[_VIEW]]
                ggml.set_data(node, self._slot + place + fields[_VIEW_OFFSET])
        self._previous = name
        return wanted

    def _used(self, layer: int, name: bytes) -> bool:
        """A node reads this layer's weights; whether the graph must stop behind it."""
        self._last_use[layer] = (self._at, name)
        if layer == self._current:
            return False
        if layer in self._gone or layer == self._leaving or self._leaving is not None:
            self._stops.clear()
            raise BackendError(
                f"The model does not use its layers one after the other (layer {layer}).",
                "Use --offload mmap.",
            )
        self._stops[self._at - 1] = _Stop(self._previous, self._current, layer)
        self._leaving = self._current
        self._enter(layer)
        return True

    def _done(self) -> None:
        """The graph is computed up to and with the node that was asked about last."""
        if self._leaving is not None:
            self._leave(self._leaving)
            self._leaving = None
        stop = self._stops.get(self._at)
        if stop is None or stop.name != self._previous:
            return
        if self._current is not None:
            if self._current != stop.leave:
                return  # learned from a graph of another shape
            self._leave(self._current)
            self._current = None
        if stop.enter is not None and stop.enter not in self._gone:
            self._enter(stop.enter)

    def _enter(self, layer: int) -> None:
        self._slot = self._ring.take(layer, self._stop_asked)
        for tensor, place in self._tensors[layer].items():
            ggml.set_data(tensor, self._slot + place)
        self._current = layer

    def _leave(self, layer: int) -> None:
        self._gone.add(layer)
        self._ring.give_back(layer)

    def _learn_exits(self) -> None:
        """Layers with resident ones behind them go after their last use, not when the next one comes."""
        entries = sorted(at for at, stop in self._stops.items() if stop.enter is not None)
        for layer, (at, name) in self._last_use.items():
            following = next((entry for entry in entries if entry >= at), None)
            if at not in self._stops and (following is None or following - at > _FAR):
                self._stops[at] = _Stop(name, layer, None)
