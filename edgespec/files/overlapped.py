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

    _GENERIC_READ = 0x80000000
    _SHARE_ALL = 0x1 | 0x2 | 0x4  # others may read, write, and delete or rename, as on other systems
    _OPEN_EXISTING = 3
    _NO_BUFFERING, _OVERLAPPED = 0x20000000, 0x40000000
    _IO_PENDING, _END_OF_FILE = 997, 38
    _INVALID_HANDLE = ctypes.c_void_p(-1).value

    class _Overlapped(ctypes.Structure):
        _fields_ = [
            ("internal", ctypes.c_size_t),
            ("internal_high", ctypes.c_size_t),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        ]

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateFileW.restype = wintypes.HANDLE
    _kernel.CreateFileW.argtypes = [
        *(wintypes.LPCWSTR, wintypes.DWORD, wintypes.DWORD, wintypes.LPVOID),
        *(wintypes.DWORD, wintypes.DWORD, wintypes.HANDLE),
    ]
    _kernel.CreateEventW.restype = wintypes.HANDLE
    _kernel.CreateEventW.argtypes = [wintypes.LPVOID, wintypes.BOOL, wintypes.BOOL, wintypes.LPCWSTR]
    _kernel.CloseHandle.argtypes = [wintypes.HANDLE]
    _kernel.ReadFile.argtypes = [
        *(wintypes.HANDLE, wintypes.LPVOID, wintypes.DWORD, wintypes.LPVOID),
        ctypes.POINTER(_Overlapped),
    ]
    _kernel.GetOverlappedResult.argtypes = [
        *(wintypes.HANDLE, ctypes.POINTER(_Overlapped), ctypes.POINTER(wintypes.DWORD), wintypes.BOOL),
    ]

    def _error(number: int) -> OSError:
        # Without the full stop that the system's messages end with: ours follows.
        return ctypes.WinError(number, ctypes.FormatError(number).rstrip(". "))

    class OverlappedFile:
        """See `positioned.PositionedFile`. The descriptor of the C library owns the handle.

        Raises:
            OSError: the file cannot be opened.
        """

        def __init__(self, path: Path, *, direct: bool) -> None:
            self.direct = direct
            self._descriptor = -1
            flags = _OVERLAPPED | (_NO_BUFFERING if direct else 0)
            handle = _kernel.CreateFileW(
                str(path), _GENERIC_READ, _SHARE_ALL, None, _OPEN_EXISTING, flags, None
            )
            if handle is None or handle == _INVALID_HANDLE:
                raise _error(ctypes.get_last_error())
            self._handle: int = handle
            self._descriptor = msvcrt.open_osfhandle(handle, os.O_RDONLY)

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

        def status(self) -> os.stat_result:
            return os.fstat(self._descriptor)

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
                raise _error(ctypes.get_last_error())
            self._overlapped = _Overlapped(0, 0, offset & 0xFFFFFFFF, offset >> 32, event)
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
                raise _error(error)
            return n.value
