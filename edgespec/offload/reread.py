"""Weights in memory that are read from the model's file again, to be sent to a device for long passes.

The processor computes with weights that are rearranged for it, and a device cannot read these. Small passes
are fastest with them. For hundreds of rows the device is faster, even if the weights come from the disk. So
they are read from the file, as if they were streamed, and sent from there.

ggml's scheduler first copies the rearranged weights to the device, for products that are sent (see
`kernels.native.offload`). `RereadSwitch` then writes those of the file over them, before the product is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.weight_store import AllInMemory
from edgespec.models.gguf.layers import Layer, ModelFiles
from edgespec.offload.layer_ring import LayerRing
from edgespec.offload.layout import N_READERS, Store, plain_store
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weight_memory import WeightMemory

N_SLOTS = 2
_SMALL = -1  # the number of a layer of all small matrices


def reread_layers(files: ModelFiles, layers: Sequence[Layer]) -> list[Layer]:
    """The matrices of layers, which are what products read."""
    matrices = {tensor.name for part in files.headers for tensor in part.tensors if len(tensor.shape) > 1}
    kept = (Layer(layer.index, tuple(t for t in layer.tensors if t.name in matrices)) for layer in layers)
    return [layer for layer in kept if layer.tensors]


def reread_bytes(files: ModelFiles, layers: Sequence[Layer]) -> int:
    """Bytes of memory for layers that are read once more."""
    sizes = {index: layer.n_bytes for index, layer in _store_of(files, layers).layers.items()}
    return sizes.pop(_SMALL) + N_SLOTS * max(sizes.values(), default=0)


def _store_of(files: ModelFiles, layers: Sequence[Layer]) -> Store:
    return plain_store(files, [*reread_layers(files, layers), files.small_matrices(_SMALL)])


class RereadWeights(AllInMemory):
    """Weights that are in memory, and read from the file once more for passes that send them.

    Small matrices are rearranged and sent like the others. They stay in memory as they are in the file, too.

    Args:
        layers: whose matrices may be sent, in the order in which passes read them.
        sent_to: the device.
    """

    rereads = True

    def __init__(self, files: ModelFiles, layers: Sequence[Layer], sent_to: Address) -> None:
        self._store = _store_of(files, layers)
        self._reader = StoreReader(self._store)
        self._sent_to = sent_to
        self._ring: LayerRing | None = None
        self._small: WeightMemory | None = None

    def loaded(self) -> None:
        """The model is loaded: begin to read the first layers."""
        small = self._store.layers[_SMALL]
        self._small = WeightMemory(max(small.n_bytes, 1))
        with closing(self._reader.begin_layers([small], self._small, 1)) as reads:
            reads.wait(lambda _: None)
        self._ring = LayerRing(
            self._reader,
            sorted(self._store.layers.keys() - {_SMALL}),
            n_slots=N_SLOTS,
            n_threads=N_READERS,
            new_memory=lambda n_bytes: self._reader.memory_for(n_bytes, self._sent_to),
        )
        self.unpinned = self._reader.unpinned
        self.observers = [RereadSwitch(self._ring, self._store, {_SMALL: self._small.address})]

    def close(self) -> None:
        """Free the slots, after the model has been freed."""
        for part in (self._ring, self._small):
            if part is not None:
                part.close()
        self._ring, self._small, self.observers = None, None, ()
        self._reader.close()


class RereadSwitch(GraphObserver):
    """Writes weights as they are in the file over the scheduler's copies, before products read these.

    Args:
        ring: reads the store's layers.
        held: those that are in memory, and their addresses.
    """

    def __init__(self, ring: LayerRing, store: Store, held: Mapping[int, Address]) -> None:
        self._ring = ring
        self._held = held
        self._places = {
            name.encode(): (index, place)
            for index, layer in store.layers.items()
            for name, place in layer.places.items()
        }
        self._stop_asked: Callable[[], bool] = lambda: False
        self._current: int | None = None
        self._address: Address = 0
        self.watch = Watch()
        for number, name in enumerate(self._places, start=1):
            # Nodes that read the tensor itself are the processor's: any number stands for it.
            self.watch.ask_about_copies(name, number)
            self.watch.ask_about_readers(number, 0)

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        self._stop_asked = stop

    def reached(self, node: Address) -> bool:
        """A product with copies is to be computed."""
        for copy, name in ggml.copies_among(ggml.sources_of(node)).items():
            if name in self._places:
                layer, place = self._places[name]
                if layer != self._current and layer not in self._held:
                    self._change_to(layer)
                ggml.write_copy(copy, self._held.get(layer, self._address) + place)
        return False

    def end(self, *, completed: bool) -> None:
        if self._current is not None:
            self._current = None
            self._ring.restart()

    def _change_to(self, layer: int) -> None:
        if self._current is not None:
            self._ring.release(self._current)
        self._current = None
        self._address = self._ring.acquire(layer, self._stop_asked)
        self._current = layer
