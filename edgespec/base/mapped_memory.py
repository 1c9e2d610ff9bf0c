"""Memory of the system's own, beside what programs allocate: empty, reserved, or a file's."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

if sys.platform == "win32":
    import ctypes
    import msvcrt
    import tempfile
    from ctypes import wintypes

    _SET_SPARSE = 0x900C4

    def anonymous_memory(n_bytes: int) -> mmap.mmap:
        """Memory that is taken when it is first written to; raises OSError if there is not enough."""
        return mmap.mmap(-1, n_bytes)

    def reserved_addresses(n_bytes: int) -> mmap.mmap:
        """Addresses that hold zeros and cannot be written to; raises OSError if there are not enough.

        Windows counts other memory as taken. A file does not count, and takes no disk where it has holes.
        """
        kernel = ctypes.WinDLL("kernel32")
        kernel.DeviceIoControl.argtypes = [
            *(wintypes.HANDLE, wintypes.DWORD, wintypes.LPVOID, wintypes.DWORD),
            *(wintypes.LPVOID, wintypes.DWORD, wintypes.LPVOID, wintypes.LPVOID),
        ]
        with tempfile.TemporaryFile() as file:
            handle, returned = msvcrt.get_osfhandle(file.fileno()), wintypes.DWORD()
            kernel.DeviceIoControl(handle, _SET_SPARSE, None, 0, None, 0, ctypes.byref(returned), None)
            file.truncate(n_bytes)
            return mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ)

    def use_huge_pages(area: mmap.mmap) -> None:
        """Ask for huge pages, where the system has them."""

    def read_rows_alone(area: mmap.mmap) -> None:
        """Read no more of a mapped file than what is looked at."""

    def give_back(area: mmap.mmap, start: int, n_bytes: int) -> None:
        """Take no memory for a part of a mapped file until it is looked at again."""

else:

    def anonymous_memory(n_bytes: int) -> mmap.mmap:
        """Memory that is taken when it is first written to; raises OSError if there is not enough."""
        return mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def reserved_addresses(n_bytes: int) -> mmap.mmap:
        """Addresses that hold zeros and cannot be written to; raises OSError if there are not enough.

        Read-only private memory does not count towards Linux's limit on committed memory.
        """
        area = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        use_huge_pages(area)  # where the area is read after all, one page of zeros stands for many
        return area

    def use_huge_pages(area: mmap.mmap) -> None:
        """Ask for huge pages, where the system has them."""
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without them
                area.madvise(mmap.MADV_HUGEPAGE)

    def read_rows_alone(area: mmap.mmap) -> None:
        """Read no more of a mapped file than what is looked at."""
        area.madvise(mmap.MADV_RANDOM)

    def give_back(area: mmap.mmap, start: int, n_bytes: int) -> None:
        """Take no memory for a part of a mapped file until it is looked at again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        area.madvise(mmap.MADV_DONTNEED, first, start + n_bytes - first)
