"""A model's layers outside llama.cpp: some resident in memory, the others streamed from disk."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnbackedBufferType
from edgespec.kernels.layouts import kernel_layouts
from edgespec.models.gguf.layers import ModelFiles, pattern_of
from edgespec.models.llama.runtime.graph import GraphObserver
from edgespec.models.llama.runtime.residency import BufferTypes
from edgespec.offload.layer_switch import LayerSwitch
from edgespec.offload.layout import Store
from edgespec.offload.ring import LayerRing
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weight_memory import WeightMemory

N_READERS = 2


class StreamedWeights:
    """The layers of one model: a `Residency`.

    Args:
        store: where the layers are read from.
        streamed: the layers to stream; the store's others are resident.
        n_slots: layers in the ring; at least 2.

    Attributes:
        resident_bytes: of the resident layers and of the ring.
        streamed_bytes: read for one pass.
        waited_s: total seconds that passes have waited for weights.
        read_bytes, reading_s: bytes that the ring has read, and seconds during which reads were under way.

    Raises:
        UnsupportedBuild: this llama.cpp build is not as expected.
        StreamError: the files cannot be opened.
    """

    def __init__(
        self,
        files: ModelFiles,
        store: Store,
        streamed: Sequence[int],
        *,
        n_slots: int,
        n_readers: int = N_READERS,
        on_progress: Callable[[float], None] = lambda _fraction: None,
    ) -> None:
        ggml.check()
        self._files = files
        self._store = store
        self._streamed = frozenset(streamed)
        self._n_slots = n_slots
        self._n_readers = n_readers
        self._on_progress = on_progress
        self._types: dict[str, UnbackedBufferType] = {}
        self._resident: WeightMemory | None = None
        self._ring: LayerRing | None = None
        self._switch: LayerSwitch | None = None
        self._reader = StoreReader(store)

    @property
    def direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return self._reader.direct

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that layers are read from."""
        return self._store.paths

    @property
    def packed(self) -> bool:
        """Whether layers are read from a packed file, in the layout of the CPU's kernels."""
        return self._store.packed

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that layers take, the ring included."""
        return sum(part.n_bytes for part in (self._resident, self._ring) if part is not None)

    @property
    def streamed_bytes(self) -> int:
        """Bytes read for one pass."""
        return self._ring.streamed_bytes if self._ring else 0

    @property
    def waited_s(self) -> float:
        """Total seconds that passes have waited for weights."""
        return self._ring.waited_s if self._ring else 0.0

    @property
    def read_bytes(self) -> int:
        """Bytes that the ring has read."""
        return self._ring.read_bytes if self._ring else 0

    @property
    def reading_s(self) -> float:
        """Seconds during which reads were under way."""
        return self._ring.reading_s if self._ring else 0.0

    @property
    def observers(self) -> Sequence[GraphObserver]:
        """The layer switch, if layers are streamed."""
        return [self._switch] if self._switch is not None else []

    @contextmanager
    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> Iterator[Path]:
        """Make llama.cpp create the layers' tensors without memory, and load the rest."""
        kernel_types = {layout.name: layout.address for layout in kernel_layouts()}
        groups: dict[str, list[str]] = {}
        for layer in self._store.layers.values():
            for name in layer.places:
                groups.setdefault(self._store.kernels.get(name, ""), []).append(name)
        patterns: list[tuple[str, Address]] = []
        for kernel, names in groups.items():
            self._types[kernel] = UnbackedBufferType(kernel_types[kernel] if kernel else None)
            patterns += [(pattern, self._types[kernel].address) for pattern in pattern_of(names)]
        table = ggml.overrides(patterns + buffer_types)
        params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
        yield path
        params.tensor_buft_overrides = None

    def loaded(self) -> None:
        """The model is loaded: read the resident layers, and start streaming the others.

        Raises:
            StreamError: a layer cannot be read.
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
            for index, layer in self._store.layers.items()
        }
        used = {index: places for index, places in used.items() if places}
        self._read_resident({i: places for i, places in used.items() if i not in self._streamed})
        streamed = {index: places for index, places in used.items() if index in self._streamed}
        if streamed:
            self._ring = LayerRing(
                self._reader, sorted(streamed), n_slots=self._n_slots, n_threads=self._n_readers
            )
            self._switch = LayerSwitch(self._ring, streamed)

    def amend_context(self, params: Any) -> None:
        """Keep llama.cpp from copying weights to a device, which it would do before they have been read."""
        if self._switch is not None:
            params.op_offload = False

    def close(self) -> None:
        """Free everything, after the model has been freed."""
        if self._ring is not None:
            self._ring.close()
        if self._resident is not None:
            self._resident.close()
        self._ring = self._resident = self._switch = None
        for unbacked in self._types.values():
            unbacked.close()
        self._types = {}
        self._reader.close()

    def _read_resident(self, used: Mapping[int, Mapping[Address, int]]) -> None:
        layers = [self._store.layers[index] for index in sorted(used)]
        if not layers:
            return
        self._resident = WeightMemory(sum(layer.n_bytes for layer in layers))
        starts = self._reader.read_layers(layers, self._resident, self._n_readers, self._on_progress)
        for index, places in used.items():
            for tensor, place in places.items():
                ggml.set_data(tensor, starts[index] + place)
