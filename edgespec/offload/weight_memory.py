"""Memory for weights: aligned, and in huge pages if the system has them, or pinned for a device."""

from __future__ import annotations

import contextlib
import ctypes

from edgespec.base.mapped_memory import anonymous_memory, use_huge_pages
from edgespec.base.units import readable
from edgespec.errors import MemoryLimitError
from edgespec.kernels.ggml import Address, address_of_map, functions
from edgespec.kernels.ggml.buffer_types import pinned_buffer
from edgespec.llama.runtime.device_failures import LossWatch

_HUGE_PAGE = 2 << 20
_PAGE = 4 << 10  # that reads past the page cache are aligned to


class WeightMemory:
    """`n_bytes` of anonymous memory, allocated when it is first written to.

    Touching the pages in advance would take as long as reading the weights, in a single thread.

    Raises:
        MemoryLimitError: there is not enough memory.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        try:
            self._map = anonymous_memory(n_bytes + _HUGE_PAGE)
        except (OSError, MemoryError) as error:
            raise MemoryLimitError(
                f"Not enough memory: cannot allocate {readable(n_bytes)} for weights."
            ) from error
        start = address_of_map(self._map)
        self._lead = -start % _HUGE_PAGE
        self.address: Address = start + self._lead
        self._view = memoryview(self._map)
        use_huge_pages(self._map)

    def view(self, offset: int, n_bytes: int) -> memoryview:
        """A view to write to, which must be released afterwards."""
        return self._view[self._lead + offset : self._lead + offset + n_bytes]

    def close(self) -> None:
        """Free the memory; nothing may point into it any more."""
        self._view.release()
        with contextlib.suppress(BufferError):  # freed with the exception that still holds a view
            self._map.close()


class PinnedMemory(WeightMemory):
    """Memory that a device reads by itself, which it allocates in its own way."""

    def __init__(self, buffer: Address, n_bytes: int, device: Address) -> None:
        self.n_bytes = n_bytes
        self._buffer = buffer
        self._losses = LossWatch([device])
        start = functions()["ggml_backend_buffer_get_base"](buffer)
        self._lead = -start % _PAGE
        self.address = start + self._lead
        area = (ctypes.c_ubyte * (self._lead + n_bytes)).from_address(start)
        self._view = memoryview(area).cast("B")

    @classmethod
    def allocated(cls, n_bytes: int, device: Address) -> PinnedMemory | None:
        """So many bytes; None if the device pins no memory, or not as much."""
        buffer = pinned_buffer(device, n_bytes + _PAGE)
        return cls(buffer, n_bytes, device) if buffer else None

    def close(self) -> None:
        """Free the memory, unless the device is lost; nothing may point into it any more."""
        self._view.release()
        if self._losses.lost:  # its driver would end the process
            return
        functions()["ggml_backend_buffer_free"](self._buffer)
