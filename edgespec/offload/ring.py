"""The ring buffer of layers, which are read in cyclic order ahead of the pass that needs them.

Reader threads fill free slots with the layers that come next. When a pass is done with a layer, its slot is
free again, so the first layers of the next pass are read while the drafter works. Layers are read in pieces,
so that several reads are under way at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from edgespec.kernels.ggml import Address
from edgespec.models.llama.runtime.abort import DecodeAborted
from edgespec.models.llama.runtime.residency import Meanwhile
from edgespec.offload.layout import Piece, StoredLayer
from edgespec.offload.read_meter import ReadMeter
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weight_memory import WeightMemory

_POLL_S = 0.05  # how often a wait checks whether it should end


class _Load:
    """One layer that is being read into a slot."""

    def __init__(self, layer: StoredLayer, slot: int) -> None:
        self.layer = layer
        self.slot = slot
        self.missing = len(layer.pieces)
        self.under_way = 0
        self.dropped = False
        self.error: BaseException | None = None


class LayerRing:
    """Slots, and the threads that fill them.

    Args:
        order: the streamed layers in the order that a pass uses them.

    Attributes:
        waited_s: total seconds that passes have waited for layers, without what they did meanwhile.
        meanwhile: what a pass does while it waits; see `Meanwhile`.
        meter: counts the reads.
    """

    def __init__(self, reader: StoreReader, order: Sequence[int], *, n_slots: int, n_threads: int) -> None:
        self._reader = reader
        self._order = [reader.store.layers[index] for index in order]
        self._position = {index: number for number, index in enumerate(order)}
        self._slot_bytes = max(layer.n_bytes for layer in self._order)
        self._memory = WeightMemory(self._slot_bytes * n_slots)
        self._changed = threading.Condition()
        self._free = list(range(n_slots))
        self._coming: deque[_Load] = deque()  # in the order in which they are needed
        self._held: dict[int, _Load] = {}
        self._jobs: deque[tuple[_Load, Piece]] = deque()
        self._next = 0  # position of the layer that will be asked for next
        self._closing = False
        self.waited_s = 0.0
        self.meanwhile: Meanwhile | None = None
        self.meter = ReadMeter()
        self._threads = [
            threading.Thread(target=self._work, name=f"edgespec-reader-{n}", daemon=True)
            for n in range(n_threads)
        ]
        with self._changed:
            self._fill()
        for thread in self._threads:
            thread.start()

    @property
    def n_bytes(self) -> int:
        """Bytes of all slots."""
        return self._memory.n_bytes

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
        start, worked_s = time.perf_counter(), 0.0
        with self._changed:
            try:
                load = self._held.get(layer) or self._head(layer, stop)
                works = self.meanwhile is not None
                while load.missing and load.error is None:
                    if stop():
                        raise DecodeAborted
                    if works:
                        began = time.perf_counter()
                        works = self._work_meanwhile(layer)
                        worked_s += time.perf_counter() - began if works else 0.0
                    else:
                        self._changed.wait(_POLL_S)
            finally:
                self.waited_s += time.perf_counter() - start - worked_s
            if load.error is not None:
                self._align(layer)  # the next try reads it anew
                raise load.error
            if layer not in self._held:
                self._held[layer] = self._coming.popleft()
            return self._memory.address + load.slot * self._slot_bytes

    def give_back(self, layer: int) -> None:
        """The pass is done with the layer; its slot is filled with the next one."""
        with self._changed:
            load = self._held.pop(layer, None)
            if load is not None:
                self._free.append(load.slot)
                self._fill()

    def restart(self) -> None:
        """End a pass at any point: the first layers come next."""
        with self._changed:
            for load in self._held.values():
                self._free.append(load.slot)
            self._held.clear()
            first = self._order[0].index
            if not self._coming or self._coming[0].layer.index != first:
                self._align(first)
            self._fill()

    def close(self) -> None:
        """End the threads and free the memory."""
        with self._changed:
            self._closing = True
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._memory.close()

    def _work_meanwhile(self, layer: int) -> bool:
        """Do something else while the readers go on with a layer. Returns whether anything was done."""
        assert self.meanwhile is not None
        missing = sum(piece.n_bytes for _, piece in self._jobs)
        read_ahead_s = missing * self.meter.seconds / max(self.meter.n_bytes, 1)
        left = 1 - self._position[layer] / len(self._order)
        self._changed.release()
        try:
            return self.meanwhile(read_ahead_s, left)
        finally:
            self._changed.acquire()

    def _head(self, layer: int, stop: Callable[[], bool]) -> _Load:
        """The load of a layer, moved to the front of the queue."""
        if all(load.layer.index != layer for load in self._coming):
            self._align(layer)
        while self._coming and self._coming[0].layer.index != layer:
            self._drop(self._coming.popleft())
            self._fill()
        while not self._coming:  # every slot still waits for dropped reads to end
            if stop():
                raise DecodeAborted
            self._changed.wait(_POLL_S)
            self._fill()
        return self._coming[0]

    def _align(self, layer: int) -> None:
        """Drop what is coming, and begin with this layer."""
        while self._coming:
            self._drop(self._coming.popleft())
        self._next = self._position[layer]
        self._fill()

    def _drop(self, load: _Load) -> None:
        load.dropped = True
        self._jobs = deque(job for job in self._jobs if job[0] is not load)
        if not load.under_way:
            self._free.append(load.slot)

    def _fill(self) -> None:
        """Request the layers that come next, as long as there are free slots."""
        while self._free and len(self._coming) + len(self._held) < len(self._order):
            layer = self._order[self._next % len(self._order)]
            self._next += 1
            load = _Load(layer, self._free.pop())
            self._coming.append(load)
            self._jobs.extend((load, piece) for piece in layer.pieces)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                load, piece = self._jobs.popleft()
                load.under_way += 1
                self.meter.begun()
            error: BaseException | None = None
            try:
                with self._memory.view(load.slot * self._slot_bytes + piece.at, piece.n_bytes) as memory:
                    self._reader.read(piece, memory)
            except BaseException as caught:  # raised where the layer is needed
                error = caught
            with self._changed:
                self.meter.ended(piece.n_bytes)
                load.under_way -= 1
                load.missing -= 1
                load.error = load.error or error
                if load.dropped:
                    if not load.under_way:
                        self._free.append(load.slot)
                        self._fill()
                elif not load.missing or load.error:
                    self._changed.notify_all()
