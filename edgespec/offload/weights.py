"""A model's layers outside llama.cpp: some resident in memory, the others streamed from disk.

Tables of which passes look up rows are left in the model's files.

Of a mixture of experts, single experts can be streamed: its layers are then what every token needs of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import BackendError, EdgeSpecError
from edgespec.generation.expert_use import ExpertUse
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnbackedBufferType
from edgespec.kernels.layouts import available_layouts
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.weight_store import BufferTypes, WeightStore
from edgespec.models.gguf.layers import ModelFiles, pattern_of
from edgespec.offload.device_copies import DeviceCopies
from edgespec.offload.experts.pool import ExpertPool
from edgespec.offload.experts.switch import ExpertSwitch
from edgespec.offload.layer_ring import LayerRing, LayerSwitch
from edgespec.offload.layout import N_READERS, Store
from edgespec.offload.slot_filler import SlotFiller
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.tables import MappedTables
from edgespec.offload.weight_memory import WeightMemory

N_EXPERT_READERS = 4  # single experts are small, and a pass waits for all that it misses


class StreamedWeights:
    """The layers of one model: a `WeightStore`.

    Args:
        store: where the layers are read from.
        streamed: the layers to stream; the store's others are resident.
        n_slots: layers in the ring; at least 2.
        expert_slots: experts in the pool, if the store has any.
        n_used: experts of each layer that a token needs.
        sent_to: a device that may be sent weights; the slots are then in memory that is pinned for it.
        beside: what notices that layers on other machines are lost; closed with this.
        while_loading: called once while the resident layers are read.

    Attributes:
        store: as given.

    Raises:
        UnsupportedBuild: this llama.cpp build is not as expected.
    """

    rereads = False

    def __init__(
        self,
        files: ModelFiles,
        store: Store,
        streamed: Sequence[int],
        *,
        n_slots: int,
        expert_slots: int = 0,
        n_used: int = 0,
        sent_to: Address | None = None,
        n_readers: int = N_READERS,
        beside: WeightStore | None = None,
        on_progress: Callable[[float], None] = lambda _fraction: None,
        while_loading: Callable[[], None] = lambda: None,
    ) -> None:
        ggml.check()
        self._files = files
        self.store = store
        self._streamed = frozenset(streamed)
        self._n_slots = n_slots
        self._expert_slots = expert_slots
        self._n_used = n_used
        self._n_readers = n_readers
        self._sent_to = sent_to
        self._copies: DeviceCopies | None = None
        self._beside = beside
        self._on_progress = on_progress
        self._while_loading = while_loading
        self._types: dict[str, UnbackedBufferType] = {}
        self._resident: WeightMemory | None = None
        self._ring: LayerRing | None = None
        self._pool: ExpertPool | None = None
        self._observers: list[GraphObserver] = []
        self._tables = MappedTables(files)
        self._reader = StoreReader(store)

    @property
    def direct(self) -> bool:
        """True if reads bypass the page cache."""
        return self._reader.direct

    @property
    def unpinned(self) -> bool:
        """True if weights are sent from memory that could not be pinned."""
        return self._reader.unpinned

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that layers are read from."""
        return self.store.paths

    @property
    def packed(self) -> bool:
        """True if layers are read from a packed file, in the layout of the CPU's kernels."""
        return self.store.packed

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that layers take, with the ring and the pool of experts."""
        resident = self._resident.n_bytes if self._resident else 0
        return resident + sum(slots.n_bytes for slots in self._slots)

    @property
    def streamed_bytes(self) -> int:
        """Bytes read for one pass; of experts, what a pass over one row would read if chance alone decided
        which of its experts are in memory.
        """
        n_bytes = self._ring.streamed_bytes if self._ring else 0
        if self._pool is not None:
            needed = self._n_used * len(self.store.experts) * self._pool.slots.slot_bytes
            n_bytes += round(needed * (1 - self.experts_held))
        return n_bytes

    @property
    def expert_use(self) -> ExpertUse | None:
        """Hits and misses of experts so far; None if no single experts are streamed."""
        return self._pool.use if self._pool else None

    @property
    def experts_held(self) -> float:
        """The share of a mixture's experts that is in memory at a time."""
        return self._pool.n_slots / self._pool.n_experts if self._pool else 1.0

    @property
    def waited_s(self) -> float:
        """Total seconds that passes have waited for weights."""
        return sum(slots.waited_s for slots in self._slots)

    @property
    def setup_s(self) -> float:
        """Total seconds that passes have spent on one-time setup for their number of rows."""
        return 0.0 if self._beside is None else self._beside.setup_s

    @property
    def read_bytes(self) -> int:
        """Bytes that the ring and the pool have read."""
        return sum(slots.meter.n_bytes for slots in self._slots)

    @property
    def reading_s(self) -> float:
        """Seconds during which reads were under way."""
        return sum(slots.meter.seconds for slots in self._slots)

    @property
    def disk_rates(self) -> Mapping[Path, float]:
        """Bytes per second that each disk has read for passes, where layers are spread over several disks."""
        if not self.store.spread:
            return {}
        rates = {}
        for number, path in enumerate(self.store.paths):
            meters = [slots.disk_meters[number] for slots in self._slots]
            seconds = sum(meter.seconds for meter in meters)
            rates[path] = sum(meter.n_bytes for meter in meters) / seconds if seconds > 0 else 0.0
        return rates

    @property
    def _slots(self) -> list[SlotFiller]:
        return [part.slots for part in (self._ring, self._pool) if part is not None]

    @property
    def observers(self) -> Sequence[GraphObserver]:
        """The switches of layers and of experts, as far as they are streamed."""
        return self._observers

    @property
    def _layer_switches(self) -> list[LayerSwitch]:
        return [observer for observer in self._observers if isinstance(observer, LayerSwitch)]

    @contextmanager
    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> Iterator[Path]:
        """Make llama.cpp create the layers' tensors without memory, and load the rest."""
        kernel_types = {layout.name: layout.address for layout in available_layouts()}
        groups: dict[str, list[str]] = {}
        stored = [layer.places for layer in self.store.layers.values()]
        stored += [experts.places for experts in self.store.experts.values()]
        for places in stored:
            for name in places:
                groups.setdefault(self.store.kernels.get(name, ""), []).append(name)
        patterns: list[tuple[str, Address]] = []
        for kernel, names in groups.items():
            self._types[kernel] = UnbackedBufferType(kernel_types[kernel] if kernel else None)
            patterns += [(pattern, self._types[kernel].address) for pattern in pattern_of(names)]
        if self._tables.names:
            plain = self._types.setdefault("", UnbackedBufferType(None))
            patterns += self._tables.patterns(plain.address)
        table = ggml.overrides(patterns + buffer_types)
        params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
        yield path
        params.tensor_buft_overrides = None

    def loaded(self) -> None:
        """The model is loaded: read the resident layers, and start streaming the others.

        Raises:
            BackendError: llama.cpp could not create the layers' buffers.
        """
        tensors: dict[str, Address] = {}
        for unbacked in self._types.values():
            if unbacked.error is not None:
                raise BackendError(f"Weights cannot be streamed: {unbacked.error}.") from unbacked.error
            unbacked.finalize()
            tensors.update(unbacked.tensors)
        # llama.cpp skips tensors that it does not use, such as those of multi-token prediction layers.
        used = {
            index: {tensors[name]: place for name, place in layer.places.items() if name in tensors}
            for index, layer in self.store.layers.items()
        }
        used = {index: places for index, places in used.items() if places}
        self._read_resident({i: places for i, places in used.items() if i not in self._streamed})
        streamed = {index: places for index, places in used.items() if index in self._streamed}
        if streamed:
            self._ring = LayerRing(
                self._reader,
                sorted(streamed),
                n_slots=self._n_slots,
                n_threads=self._n_readers,
                new_memory=self._new_memory,
            )
            if self._sent_to is not None:
                names = (name for index in streamed for name in self.store.layers[index].places)
                self._copies = DeviceCopies(
                    {name.encode(): tensors[name] for name in names if name in tensors}
                )
            self._observers.append(LayerSwitch(self._ring, streamed, self._copies))
        self._open_pool(tensors)
        self._tables.place(tensors)

    def amend_context(self, params: Any, *, sends: bool = False, keeps_views: bool = True) -> None:
        """Keep llama.cpp from copying weights to devices, unless somebody sees to it that they are there."""
        if self._observers and (not sends or self._copies is None or self._pool is not None):
            params.op_offload = False
        for switch in self._layer_switches:
            switch.allows_views = keeps_views

    @contextmanager
    def keeping_last(self) -> Iterator[None]:
        """A block in which the last layer stays in memory until the end of a pass."""
        for switch in self._layer_switches:
            switch.keeps_last = True
        try:
            yield
        finally:
            for switch in self._layer_switches:
                switch.keeps_last = False

    def failure(self) -> EdgeSpecError | None:
        """An error if a machine is gone or a table has changed; layers are an error of the decode that needs
        them.
        """
        lost = None if self._beside is None else self._beside.failure()
        return lost or self._tables.change()

    def close(self) -> None:
        """Free everything, after the model has been freed."""
        for part in (self._ring, self._pool, self._resident, self._copies):
            if part is not None:
                part.close()
        self._ring = self._pool = self._resident = self._copies = None
        self._observers = []
        for unbacked in self._types.values():
            unbacked.close()
        self._types = {}
        self._tables.close()
        self._reader.close()
        if self._beside is not None:
            self._beside.close()

    def _read_resident(self, used: Mapping[int, Mapping[Address, int]]) -> None:
        layers = [self.store.layers[index] for index in sorted(used)]
        if not layers:
            return self._while_loading()
        self._resident = self._new_memory(sum(layer.n_bytes for layer in layers))
        reads = self._reader.begin_layers(layers, self._resident, self._n_readers)
        try:
            self._while_loading()
            reads.wait(self._on_progress)
        finally:
            reads.close()
        for index, places in used.items():
            for tensor, place in places.items():
                ggml.set_data(tensor, reads.starts[index] + place)
        return None

    def _new_memory(self, n_bytes: int) -> WeightMemory:
        if self._sent_to is None:
            return WeightMemory(n_bytes)
        return self._reader.memory_for(n_bytes, self._sent_to)

    def _open_pool(self, tensors: Mapping[str, Address]) -> None:
        """Put the stacks of experts that llama.cpp uses into a pool."""
        used = {
            index: {tensors[name]: place for name, place in stored.places.items() if name in tensors}
            for index, stored in self.store.experts.items()
        }
        used = {index: places for index, places in used.items() if places}
        if not used:
            return
        pool = self._pool = ExpertPool(
            self._reader, used, n_slots=self._expert_slots, n_threads=N_EXPERT_READERS
        )
        for places in used.values():
            for stack, place in places.items():
                ggml.place_stack(stack, pool.address + place, pool.slots.slot_bytes, pool.n_slots)
        n_experts = {index: self.store.experts[index].n_experts for index in used}
        stacks = {index: list(places) for index, places in used.items()}
        self._observers.append(ExpertSwitch(pool, stacks, n_experts))
