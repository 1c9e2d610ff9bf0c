"""Memory from the system itself, without the allocator: for weights, and for addresses without weights."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress


def anonymous_memory(n_bytes: int) -> mmap.mmap:
    """Memory of the system, allocated when it is first written to; raises OSError if there is not enough."""
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def address_space(n_bytes: int) -> mmap.mmap:
    """Addresses that hold zeros and cannot be written to; raises OSError if there are not enough.

    Read-only private memory does not count towards Linux's limit on committed memory. Windows counts it.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes, access=mmap.ACCESS_READ)
    area = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    use_huge_pages(area)  # where the area is read after all, one page of zeros stands for many
    return area


def use_huge_pages(area: mmap.mmap) -> None:
    """Ask for huge pages, where the system has them."""
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without them
            area.madvise(mmap.MADV_HUGEPAGE)
