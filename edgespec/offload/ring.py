"""The ring buffer of layers, which are read in cyclic order ahead of the pass that needs them.

Reader threads fill free slots with the layers that come next. When a pass is done with a layer, its slot is
free again, so the first layers of the next pass are read while the drafter works. Layers are read in pieces,
so that several reads are under way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from edgespec.kernels.ggml import Address
from edgespec.models.llama.runtime.residency import Meanwhile
from edgespec.offload.layout import Read
from edgespec.offload.slot_filler import Load, SlotFiller
from edgespec.offload.store_reader import StoreReader


class LayerRing:
    """Decides which layer is read into which slot.

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
