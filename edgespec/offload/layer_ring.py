"""Streaming layers through a ring of slots: one layer's weights leave memory, the next one's arrive.

`LayerRing` reads layers in cyclic order, ahead of the pass that needs them. When a pass is done with a layer,
its slot is filled with the layer that comes next, so the first layers of the next pass are read while the
drafter works.

`LayerSwitch` hands layers over while a graph is computed. This needs no names of any architecture: a node
belongs to the layer whose weights it reads. The first time a graph of some shape is computed, it stops after
the first node that reads a layer's weights, so these must be in memory before that node. From then on it
stops one node earlier, so that the earlier layer is finished before the next one is waited for. No node is
ever computed without its weights: a stop that was learned from a different graph costs time, but never
correctness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.models.llama.runtime.residency import Meanwhile
from edgespec.offload.layout import Read
from edgespec.offload.slot_filler import Load, SlotFiller
from edgespec.offload.store_reader import StoreReader

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


class LayerRing:
    """Decides which layer is read into which slot.

    Layers are read in pieces, so that several reads are under way at once.

    Args:
        order: the streamed layers in the order that a pass uses them.

    Attributes:
        slots: holds the layers, and reads them; loads are numbered by layer.
        meanwhile: what a pass does while it waits; see `Meanwhile`.
    """

    def __init__(self, reader: StoreReader, order: Sequence[int], *, n_slots: int, n_threads: int) -> None:
        self._order = [reader.store.layers[index] for index in order]
        self._position = {index: number for number, index in enumerate(order)}
        self._free = list(range(n_slots))
        self._coming: deque[Load] = deque()  # in the order in which they are needed
        self._held: dict[int, Load] = {}
        self._dropped: set[Load] = set()  # still being read, for nobody
        self._next = 0  # position of the layer that will be asked for next
        self.meanwhile: Meanwhile | None = None
        self.slots = SlotFiller(
            reader,
            n_slots=n_slots,
            slot_bytes=max(layer.n_bytes for layer in self._order),
            n_threads=n_threads,
            on_ended=self._read_ended,
        )
        with self.slots.lock:
            self._fill()

    @property
    def streamed_bytes(self) -> int:
        """Bytes read for one pass."""
        return sum(layer.n_bytes for layer in self._order)

    def take(self, layer: int, stop: Callable[[], bool]) -> Address:
        """The layer's address, when it has been read. It stays valid until `give_back`.

        Args:
            stop: polled while waiting; ends the wait.

        Raises:
            StreamError: it could not be read.
            DecodeAborted: `stop` said so.
        """
        with self.slots.waiting():
            load = self._held.get(layer) or self._head(layer, stop)
            meanwhile, left = self.meanwhile, 1 - self._position[layer] / len(self._order)
            while load.missing and load.error is None:
                if meanwhile is None:
                    self.slots.wait(stop)
                elif not self.slots.work(meanwhile, left, stop):
                    meanwhile = None
            if load.error is not None:
                self._align(layer)  # the next try reads it anew
                raise load.error
            if layer not in self._held:
                self._held[layer] = self._coming.popleft()
            return self.slots.address_of(load.slot)

    def give_back(self, layer: int) -> None:
        """The pass is done with the layer; its slot is filled with the next one."""
        with self.slots.lock:
            load = self._held.pop(layer, None)
            if load is not None:
                self._free.append(load.slot)
                self._fill()

    def restart(self) -> None:
        """End a pass at any point: the first layers come next."""
        with self.slots.lock:
            for load in self._held.values():
                self._free.append(load.slot)
            self._held.clear()
            first = self._order[0].index
            if not self._coming or self._coming[0].what != first:
                self._align(first)
            self._fill()

    def close(self) -> None:
        """End the threads and free the memory."""
        self.slots.close()

    def _head(self, layer: int, stop: Callable[[], bool]) -> Load:
        """The load of a layer, moved to the front of the queue."""
        if all(load.what != layer for load in self._coming):
            self._align(layer)
        while self._coming and self._coming[0].what != layer:
            self._drop(self._coming.popleft())
            self._fill()
        while not self._coming:  # every slot still waits for dropped reads to end
            self.slots.wait(stop)
            self._fill()
        return self._coming[0]

    def _align(self, layer: int) -> None:
        """Drop what is coming, and begin with this layer."""
        while self._coming:
            self._drop(self._coming.popleft())
        self._next = self._position[layer]
        self._fill()

    def _drop(self, load: Load) -> None:
        self.slots.drop(load)
        if load.under_way:
            self._dropped.add(load)
        else:
            self._free.append(load.slot)

    def _fill(self) -> None:
        """Request the layers that come next, as long as there are free slots."""
        while self._free and len(self._coming) + len(self._held) < len(self._order):
            layer = self._order[self._next % len(self._order)]
            self._next += 1
            load = Load(layer.index, self._free.pop())
            self._coming.append(load)
            self.slots.read(load, map(Read.of, layer.pieces))

    def _read_ended(self, load: Load) -> bool:
        if load in self._dropped:
            if load.under_way:
                return False
            self._dropped.remove(load)
            self._free.append(load.slot)
            self._fill()
            return True
        return not load.missing or load.error is not None
