"""Streaming layers through a ring of slots: one layer's weights leave memory, the next one's arrive.

`LayerRing` reads layers in cyclic order, ahead of the pass that needs them. When a pass is done with a layer,
its slot is filled with the layer that comes next, so the first layers of the next pass are read while the
drafter works.

`LayerSwitch` hands layers over while a graph is computed. This needs no names of any architecture: a node
belongs to the layer whose weights it reads. The first time a graph of some shape is computed, it stops after
every node that reads weights of streamed layers, so that a layer can leave whenever a node reads another one.
From then on it stops once for each layer, after the last of its readers, and Python is entered nowhere else.
No node is ever computed without its weights: a node whose layer is not the current one is always asked about,
so what was learned from a different graph costs time, but never correctness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgespec.base.option import named
from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.watch import Watch
from edgespec.offload.device_copies import DeviceCopies, Place
from edgespec.offload.layout import Read
from edgespec.offload.slot_filler import SlotFiller, SlotLoad
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weight_memory import WeightMemory

_VIEW, _VIEW_OFFSET = 10, 11  # after the ten sources
_FAR = 8  # nodes between a layer's last use and the next streamed layer that justify a stop


@dataclass(frozen=True)
class _Stop:
    """A stop of the graph: one layer leaves, and another enters."""

    leave: int | None
    enter: int | None


_NEVER = _Stop(-1, -1)  # nothing happens: graphs of different shapes have the same node at the same place


class LayerSwitch:
    """Provides a layer's weights before the first node that reads them, and releases them after the last.

    Args:
        tensors: layer to the addresses of its tensors, with their offsets in the slot.
        copies: of the weights on a device; None if none are sent there.

    Attributes:
        keeps_last: the last layer stays in memory until the pass is over.
        allows_views: views of weights are read where the weights are: no device has copies of them.
    """

    def __init__(
        self,
        ring: LayerRing,
        tensors: Mapping[int, Mapping[Address, int]],
        copies: DeviceCopies | None = None,
    ) -> None:
        self._ring = ring
        self._copies = copies
        self._tensors = tensors
        self._layer_of = {tensor: layer for layer, places in tensors.items() for tensor in places}
        # Of weights, in this pass's graph: their layers, and their offsets in these layers' slots.
        self._views: dict[Address, tuple[int, int]] = {}
        self._stops: dict[tuple[int, bytes], _Stop | None] = {}  # None: pass over
        self._stop_asked: Callable[[], bool] = lambda: False
        self.keeps_last, self.allows_views = False, True
        self.watch = Watch()
        for tensor, layer in self._layer_of.items():
            self.watch.ask_about_readers(tensor, layer)
        if copies is not None:
            copies.watch(self.watch)
        self._reset()

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        self._stop_asked = stop
        self._reset()

    def end(self, *, completed: bool) -> None:
        if self._copies is not None:
            self._copies.leave(self._layer_of)
        self._ring.restart()
        if completed and self._unknown:
            self._learn()

    def _reset(self) -> None:
        self._current: int | None = None
        self._leaving: int | None = None
        self._entered = False  # the current layer, and none of its readers was asked about yet
        self.watch.set_current(None)
        self._slot: Address = 0
        self._gone: set[int] = set()
        self._unknown = False  # whether the pass has come to a reader that was not learned
        for view in self._views:
            self.watch.forget_tensor(view)
        self._views.clear()

    def reached(self, node: Address) -> bool:
        """A node that reads weights is about to be computed. Returns whether the graph must stop after it.

        It is one that was not learned, or comes at another place than learned, or a view; or it reads copies
        that were not found to be right.
        """
        fields = ggml.read_node(node)
        if (viewed := fields[_VIEW]) in self._layer_of:
            self._add_view(node, viewed, fields[_VIEW_OFFSET])
            return False
        copies = {} if self._copies is None else self._copies.read_by(fields[:_VIEW])
        sources = (*fields[: _VIEW + 1], *copies.values())
        layers = {self._layer_of[source] for source in sources if source in self._layer_of}
        layers |= {self._views[source][0] for source in sources if source in self._views}
        if len(layers) > 1:
            raise self._cannot_be_streamed(max(layers))
        (layer,) = layers
        place = self.watch.at, ggml.name_of(node)
        known = place in self._stops and layer == self._current
        if layer != self._current:
            self._change_to(layer)
        first, self._entered = self._entered, False
        if self._copies is not None and copies:
            self._copies.provide(place, copies, known=known, first=first)
        if known and copies:
            self._mark(place)
            return self._stops[place] is not None
        self._unknown = True
        return True  # so that the layer can leave as soon as a node reads another one

    def _add_view(self, view: Address, viewed: Address, offset: int) -> None:
        """Have a view of a weight point into its layer's slot while the layer is in memory.

        Its address was set when the graph was allocated. A view may come long before the node that reads it.
        """
        if not self.allows_views:
            raise BackendError(
                "The model reads weights in other shapes than they are stored in: without EdgeSpec's own "
                "kernels, they cannot be streamed beside a graphics card.",
                f"Use {named('gpu_layers', 0)}.",
            )
        layer = self._layer_of[viewed]
        place = self._tensors[layer][viewed] + offset
        self._views[view] = layer, place
        self._unknown = True
        self.watch.ask_about_readers(view, layer)
        if layer == self._current:
            ggml.set_data(view, self._slot + place)

    def computed(self, node: Address) -> None:
        """The graph has stopped after a node: the layer may be done with, and another one may come next."""
        if self._leaving is not None:
            self._release(self._leaving)
            self._leaving = None
        stop = self._stops.get((self.watch.at, ggml.name_of(node)))
        if stop is None or stop.leave != self._current:
            return  # or learned from a graph of another shape
        if stop.leave is not None:
            self._leave()
        if stop.enter is not None and stop.enter not in self._gone:
            self._enter(stop.enter)

    def _change_to(self, layer: int) -> None:
        """A node reads another layer's weights."""
        if layer in self._gone or self._leaving is not None:
            self._stops.clear()
            self.watch.unmark()
            if self._copies is not None:
                self._copies.forget()
            raise self._cannot_be_streamed(layer)
        if self.watch.pending:  # learned from a graph of another shape: readers are not computed yet
            self._leaving = self._current
        elif self._current is not None:
            self._leave()
        self._enter(layer)

    def _cannot_be_streamed(self, layer: int) -> BackendError:
        return BackendError(
            f"The model does not use its layers in order (layer {layer}).",
            f"Use {named('offload', 'mmap')}.",
        )

    def _enter(self, layer: int) -> None:
        self._slot = self._ring.acquire(layer, self._stop_asked)
        for tensor, place in self._tensors[layer].items():
            ggml.set_data(tensor, self._slot + place)
        for view, (owner, place) in self._views.items():
            if owner == layer:
                ggml.set_data(view, self._slot + place)
        self._current, self._entered = layer, True
        self.watch.set_current(layer)

    def _leave(self) -> None:
        assert self._current is not None
        self._release(self._current)
        self._current = None
        self.watch.set_current(None)

    def _release(self, layer: int) -> None:
        self._gone.add(layer)
        if not (self.keeps_last and layer == max(self._tensors)):
            if self._copies is not None:
                self._copies.leave(self._tensors[layer])
            self._ring.release(layer)

    def _learn(self) -> None:
        """Learn where a graph of this shape has to stop, and which readers it can pass over.

        It stops after the last reader of a layer. The next layer enters there, too, or before its first
        reader if that is far away: then what lies in between is computed before the layer is waited for.
        """
        readers = [(reader, self._layer_of.get(reader.tensor)) for reader in self.watch.readers()]
        if any(layer is None for _, layer in readers):
            return  # views are at new addresses in every pass
        first, layer = readers[0]
        self._remember(first.at - 1, first.before, _Stop(None, layer))
        for (reader, layer), (following, next_layer) in pairwise(readers):
            if next_layer == layer:
                self._remember(reader.at, reader.name, None)
            elif following.at - reader.at <= _FAR:
                self._remember(reader.at, reader.name, _Stop(layer, next_layer))
            else:
                self._remember(reader.at, reader.name, _Stop(layer, None))
                self._remember(following.at - 1, following.before, _Stop(None, next_layer))
        last, layer = readers[-1]
        self._remember(last.at, last.name, _Stop(layer, None))

    def _remember(self, at: int, name: bytes, stop: _Stop | None) -> None:
        if at < 0:
            return
        if self._stops.setdefault((at, name), stop) != stop:
            self._stops[at, name] = _NEVER
        self._mark((at, name))

    def _mark(self, place: Place) -> None:
        """Tell the watch what to do about a node that was learned."""
        stop = self._stops[place]
        answer = None if stop == _NEVER else stop is not None
        right = self._copies is not None and self._copies.are_right(place)
        self.watch.mark(*place, answer, of_copies=right)


class LayerRing:
    """Decides which layer is read into which slot.

    Layers are read in pieces, so that several reads are under way at once. Small layers that follow one
    another share a slot: the disk would be idle while a single one of them takes a slot with room for more.

    Args:
        order: the streamed layers in the order that a pass uses them.
        new_memory: allocates the slots.

    Attributes:
        slots: holds the layers, and reads them; loads are numbered by layer.
    """

    def __init__(
        self,
        reader: StoreReader,
        order: Sequence[int],
        *,
        n_slots: int,
        n_threads: int,
        new_memory: Callable[[int], WeightMemory] = WeightMemory,
    ) -> None:
        self._order = [reader.store.layers[index] for index in order]
        self._position = {index: number for number, index in enumerate(order)}
        self._free = list(range(n_slots))
        self._users = [0] * n_slots  # loads in each slot that are coming, held or dropped
        self._coming: deque[SlotLoad] = deque()  # in the order in which they are needed
        self._held: dict[int, SlotLoad] = {}
        self._dropped: set[SlotLoad] = set()  # still being read, for nobody
        self._next = 0  # position of the layer that will be asked for next
        slot_bytes = max(layer.n_bytes for layer in self._order)
        self._together = _together([layer.n_bytes for layer in self._order], slot_bytes)
        self.slots = SlotFiller(
            reader,
            n_slots=n_slots,
            slot_bytes=slot_bytes,
            n_threads=n_threads,
            on_ended=self._read_ended,
            new_memory=new_memory,
        )
        with self.slots.lock:
            self._fill()

    @property
    def streamed_bytes(self) -> int:
        """Bytes read for one pass."""
        return sum(layer.n_bytes for layer in self._order)

    def acquire(self, layer: int, stop: Callable[[], bool]) -> Address:
        """The layer's address, when it has been read. It stays valid until `release`.

        Args:
            stop: polled while waiting; ends the wait.

        Raises:
            DecodeAborted: `stop` said so.
        """
        with self.slots.waiting():
            load = self._held.get(layer) or self._head(layer, stop)
            while load.missing and load.error is None:
                self.slots.wait(stop)
            if load.error is not None:
                self._align(layer)  # the next try reads it anew
                raise load.error
            if layer not in self._held:
                self._held[layer] = self._coming.popleft()
            return self.slots.address_of_load(load)

    def release(self, layer: int) -> None:
        """The pass is done with the layer; its slot is filled with the next one."""
        with self.slots.lock:
            load = self._held.pop(layer, None)
            if load is not None:
                self._leave_slot(load)
                self._fill()

    def restart(self) -> None:
        """End a pass at any point: the first layers come next."""
        with self.slots.lock:
            for load in self._held.values():
                self._leave_slot(load)
            self._held.clear()
            first = self._order[0].index
            if not self._coming or self._coming[0].what != first:
                self._align(first)
            self._fill()

    def close(self) -> None:
        """End the threads and free the memory."""
        self.slots.close()

    def _head(self, layer: int, stop: Callable[[], bool]) -> SlotLoad:
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

    def _drop(self, load: SlotLoad) -> None:
        self.slots.drop(load)
        if load.under_way:
            self._dropped.add(load)
        else:
            self._leave_slot(load)

    def _leave_slot(self, load: SlotLoad) -> None:
        self._users[load.slot] -= 1
        if not self._users[load.slot]:
            self._free.append(load.slot)

    def _fill(self) -> None:
        """Request the layers that come next, as long as there are free slots."""
        while self._free:
            first = self._next % len(self._order)
            layers = self._order[first : self._together[first]]
            if len(self._coming) + len(self._held) + len(layers) > len(self._order):
                return
            self._next += len(layers)
            slot, end = self._free.pop(), 0
            self._users[slot] = len(layers)
            for layer in layers:
                load = SlotLoad(layer.index, slot, end)
                end += layer.n_bytes
                self._coming.append(load)
                self.slots.read(load, map(Read.of, layer.pieces))

    def _read_ended(self, load: SlotLoad) -> bool:
        if load in self._dropped:
            if load.under_way:
                return False
            self._dropped.remove(load)
            self._leave_slot(load)
            self._fill()
            return True
        return not load.missing or load.error is not None


def _together(sizes: Sequence[int], slot_bytes: int) -> list[int]:
    """For each layer in order, the end of the run of layers from it on that share a slot."""
    ends = []
    for start, size in enumerate(sizes):
        end, used = start + 1, size
        while end < len(sizes) and used + sizes[end] <= slot_bytes:
            used += sizes[end]
            end += 1
        ends.append(end)
    return ends
