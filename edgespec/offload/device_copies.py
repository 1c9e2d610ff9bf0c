"""Copies of streamed weights on a device, which ggml's scheduler makes for products that are sent there.

The scheduler divides a graph into splits: runs of nodes for one device. Before it computes a split, it copies
the weights that the split reads, from wherever their tensors point to. The eval callback is asked about the
nodes only afterwards. But a product with such a weight begins a split of its own, so the copies are right if
the layer is in memory before: a graph of a known shape has stopped there, and the layer has entered.

ggml promises none of this. So while a layer is not in memory, its tensors point to zeros, and a copy that was
made too early holds these. Every reader's copies are looked at once; those of a layer's first reader are
looked at in every pass, since they alone may be made in a split that began before the layer entered. Where
copies are zeros, and where a graph is not known yet, they are made again when the reader is asked about. A
copy that holds anything else was made from the layer, or will be: some backends copy only when they compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.watch import Watch
from edgespec.offload.weight_memory import WeightMemory

_WINDOW = 4 << 10  # bytes that are looked at

Place = tuple[int, bytes]
"""A node's number and name."""


class DeviceCopies:
    """The copies of a model's streamed weights in a pass.

    Args:
        names: of the tensors of all streamed layers.
    """

    def __init__(self, names: Mapping[bytes, Address]) -> None:
        self._f = ggml.functions()
        self._originals = dict(names)
        self._zeros = WeightMemory(max(self._f["ggml_nbytes"](tensor) for tensor in names.values()))
        self._right: set[Place] = set()  # readers for which the scheduler's copies are
        self.leave(names.values())

    def watch(self, watch: Watch) -> None:
        """Have a watch ask about nodes that read copies."""
        for name, tensor in self._originals.items():
            watch.ask_about_copies(name, tensor)

    def read_by(self, sources: Sequence[Address]) -> dict[Address, Address]:
        """The copies among the sources of a node, each with the tensor that it is of."""
        named = ggml.copies_among(sources).items()
        return {copy: self._originals[name] for copy, name in named if name in self._originals}

    def leave(self, tensors: Iterable[Address]) -> None:
        """Weights leave memory: copies of them are zeros from now on."""
        for tensor in tensors:
            ggml.set_data(tensor, self._zeros.address)

    def are_right(self, place: Place) -> bool:
        """True if a reader's copies were found to be made from its layer."""
        return place in self._right

    def forget(self) -> None:
        """Look at all copies anew."""
        self._right.clear()

    def provide(
        self, place: Place, copies: Mapping[Address, Address], *, known: bool, first: bool = False
    ) -> None:
        """Make a reader's copies again unless the scheduler's are right; the reader's layer is in memory.

        Args:
            known: the layer entered where the graph was to stop for it.
            first: no other reader has been asked about since.
        """
        if known and all(self._holds_copy(copy, original) for copy, original in copies.items()):
            if not first:
                self._right.add(place)
            return
        for copy, original in copies.items():
            ggml.write_copy(copy, self._f["ggml_get_data"](original))

    def close(self) -> None:
        """Free the zeros, after the model has been freed."""
        self._zeros.close()

    def _holds_copy(self, copy: Address, original: Address) -> bool:
        """True if a copy holds something where the tensor does; False if the tensor holds only zeros."""
        data, n_bytes = self._f["ggml_get_data"](original), self._f["ggml_nbytes"](original)
        for at in range(0, n_bytes, _WINDOW):
            size = min(n_bytes - at, _WINDOW)
            if any(ctypes.string_at(data + at, size)):
                window = ctypes.create_string_buffer(size)
                self._f["ggml_backend_tensor_get"](copy, ctypes.addressof(window), at, size)
                return any(window.raw)
        return False
