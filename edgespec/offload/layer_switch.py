"""Switching layers while a graph is computed: one layer's weights leave memory, the next one's arrive.

This needs no names of any architecture: a node belongs to the layer whose weights it reads. The first time a
graph of some shape is computed, it stops after the first node that reads a layer's weights, so these must be
in memory before that node. From then on it stops one node earlier, so that the earlier layer is finished
before the next one is waited for. No node is ever computed without its weights: a stop that was learned from
a different graph costs time, but never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.offload.ring import LayerRing

_VIEW, _VIEW_OFFSET, _NAME = 10, 11, 13  # after the ten sources
_FAR = 8  # nodes between a layer's last use and the next streamed layer that justify a stop


@dataclass(frozen=True)
class _Stop:
    """A place in the graph: after the node `name`, one layer leaves and another enters."""

    name: bytes
    leave: int | None
    enter: int | None


class LayerSwitch:
    """Provides a layer's weights before the first node that reads them, and releases them after the last.

    Args:
        tensors: layer to the addresses of its tensors, with their offsets in the slot.
    """

    def __init__(self, ring: LayerRing, tensors: Mapping[int, Mapping[Address, int]]) -> None:
        self._ring = ring
        self._tensors = tensors
        self._layer_of = {tensor: layer for layer, places in tensors.items() for tensor in places}
        self._known = frozenset(self._layer_of)
        self._stops: dict[int, _Stop] = {}
        self._stop_asked: Callable[[], bool] = lambda: False
        self._reset()

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A pass begins."""
        self._stop_asked = stop
        self._reset()

    def end(self, *, completed: bool) -> None:
        """The pass is over."""
        self._ring.restart()
        if completed:
            self._learn_exits()

    def _reset(self) -> None:
        self._at = -1
        self._previous = b""
        self._current: int | None = None
        self._leaving: int | None = None
        self._slot: Address = 0
        self._gone: set[int] = set()
        self._last_use: dict[int, tuple[int, bytes]] = {}

    def reached(self, node: Address) -> bool:
        """A node is about to be computed. Returns whether the graph must stop after it."""
        self._at += 1
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
                # A view's address was set when the graph was allocated.
                place = self._tensors[self._layer_of[fields[_VIEW]]][fields[_VIEW]]
                ggml.set_data(node, self._slot + place + fields[_VIEW_OFFSET])
        self._previous = name
        return wanted

    def _used(self, layer: int, name: bytes) -> bool:
        """A node reads this layer's weights. Returns whether the graph must stop after it."""
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

    def computed(self) -> None:
        """The graph is computed up to and including the node that was reached last."""
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
        """Learn to release layers that are followed by resident ones after their last use."""
        entries = sorted(at for at, stop in self._stops.items() if stop.enter is not None)
        for layer, (at, name) in self._last_use.items():
            following = next((entry for entry in entries if entry >= at), None)
            if at not in self._stops and (following is None or following - at > _FAR):
                self._stops[at] = _Stop(name, layer, None)
