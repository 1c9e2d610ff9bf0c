"""Memory for weights: page-aligned, in huge pages where there are some."""

from __future__ import annotations

import contextlib
import mmap

from edgespec.errors import MemoryLimitError
from edgespec.kernels.ggml import Address, address_of_map
from edgespec.units import readable

_HUGE_PAGE = 2 << 20


class WeightMemory:
    """`n_bytes` of anonymous memory, which is there as soon as it is read into.

    Touching it first would cost as much again as the reading, and in one thread.

    Raises:
        MemoryLimitError: there is not as much.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        try:
            self._map = mmap.mmap(-1, n_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError) as error:
            raise MemoryLimitError(
                f"The system refused {readable(n_bytes)} of memory for weights."
            ) from error
        start = address_of_map(self._map)
        self._lead = -start % _HUGE_PAGE
        self.address: Address = start + self._lead
        self._view = memoryview(self._map)
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(advice)

    def view(self, offset: int, n_bytes: int) -> memoryview:
        """Bytes to write to; release it when done."""
        return self._view[self._lead + offset : self._lead + offset + n_bytes]

    def close(self) -> None:
        """Give the memory back; nothing may point into it any more."""
        self._view.release()
        with contextlib.suppress(BufferError):  # an exception still holds a view: freed with that
            self._map.close()
