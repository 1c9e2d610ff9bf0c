"""Reading at offsets on Windows: overlapped, and past the cache. Tried under Wine, which caches anyway."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import ctypes
    import mmap
    import msvcrt
    import os
    from collections.abc import Sequence
    from ctypes import wintypes
    from pathlib import Path

    from edgespec.files.sharing import GENERIC_READ, OPEN_EXISTING, Overlapped, opened_handle, system_error
    from edgespec.files.state import FileState

    _NO_BUFFERING, _OVERLAPPED = 0x20000000, 0x40000000
    _IO_PENDING, _END_OF_FILE = 997, 38

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateEventW.restype = wintypes.HANDLE
    _kernel.CreateEventW.argtypes = [wintypes.LPVOID, wintypes.BOOL, wintypes.BOOL, wintypes.LPCWSTR]
    _kernel.CloseHandle.argtypes = [wintypes.HANDLE]
    _kernel.ReadFile.argtypes = [
        *(wintypes.HANDLE, wintypes.LPVOID, wintypes.DWORD, wintypes.LPVOID),
        ctypes.POINTER(Overlapped),
    ]
    _kernel.GetOverlappedResult.argtypes = [
        *(wintypes.HANDLE, ctypes.POINTER(Overlapped), ctypes.POINTER(wintypes.DWORD), wintypes.BOOL),
    ]

    class OverlappedFile:
        """See `positioned.PositionedFile`. The descriptor of the C library owns the handle.

        Raises:
            OSError: the file cannot be opened.
        """

        def __init__(self, path: Path, *, direct: bool) -> None:
            self.direct = direct
            self._descriptor = -1
            flags = _OVERLAPPED | (_NO_BUFFERING if direct else 0)
            self._handle = opened_handle(str(path), GENERIC_READ, OPEN_EXISTING, flags)
            self._descriptor = msvcrt.open_osfhandle(self._handle, os.O_RDONLY)

        def read(self, memories: Sequence[memoryview], offset: int) -> int:
            reads: list[_Read] = []
            try:
                for memory in memories:
                    reads.append(_Read(self._handle, memory, offset))
                    offset += len(memory)
            finally:  # the system writes into the memories until each read has ended
                done = [read.wait() for read in reads]
            total = 0
            for n, memory in zip(done, memories, strict=True):
                total += n
                if n < len(memory):
                    break
            return total

        def state(self) -> FileState:
            return FileState.of(self._descriptor)

        def drop(self, offset: int, n_bytes: int) -> None:
            """Windows cannot be told."""

        def mapped(self) -> mmap.mmap:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

        def close(self) -> None:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    class _Read:
        """A read that has begun."""

        def __init__(self, handle: int, memory: memoryview, offset: int) -> None:
            self._handle = handle
            self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)
            event = _kernel.CreateEventW(None, True, False, None)
            if not event:
                raise system_error(ctypes.get_last_error())
            self._overlapped = Overlapped(0, 0, offset & 0xFFFFFFFF, offset >> 32, event)
            begun = _kernel.ReadFile(handle, self._memory, len(memory), None, ctypes.byref(self._overlapped))
            self._error = 0 if begun else ctypes.get_last_error()

        def wait(self) -> int:
            """Return how many bytes were read; raises OSError if the disk failed."""
            n = wintypes.DWORD()
            error = self._error
            if error in (0, _IO_PENDING):
                ended = _kernel.GetOverlappedResult(
                    self._handle, ctypes.byref(self._overlapped), ctypes.byref(n), True
                )
                error = 0 if ended else ctypes.get_last_error()
            _kernel.CloseHandle(self._overlapped.event)
            if error not in (0, _END_OF_FILE):
                raise system_error(error)
            return n.value
