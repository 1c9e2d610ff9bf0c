"""Files that several programs have open: locks, replacing a file that is being read, and times of changes.

On Windows, a file can be renamed or removed only while all that have it open allow that, and a lock keeps
others from reading what is locked, so the byte that is locked lies behind any content.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_PATIENCE_S, _PAUSE_S = 2.0, 0.01

if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    GENERIC_READ, GENERIC_WRITE = 0x80000000, 0x40000000
    OPEN_EXISTING, _OPEN_ALWAYS = 3, 4
    _SHARE_ALL = 0x1 | 0x2 | 0x4  # others may read, write, and delete or rename, as on other systems
    _INVALID_HANDLE = ctypes.c_void_p(-1).value
    _EXCLUSIVE_AT_ONCE = 0x2 | 0x1
    _BEHIND_ALL = 0x7FFFFFFF  # of the offset's upper half
    _REFUSED, _PENDING = 33, 997
    _READ_ATTRIBUTES, _BASIC_INFORMATION = 0x80, 0
    _EPOCH = 116_444_736_000_000_000  # 1970, in units of 100 ns from 1601 on

    class Overlapped(ctypes.Structure):
        """Windows' OVERLAPPED: where in a file something happens."""

        _fields_ = [
            ("internal", ctypes.c_size_t),
            ("internal_high", ctypes.c_size_t),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        ]

    class _BasicInformation(ctypes.Structure):
        """Windows' FILE_BASIC_INFO, whose times are in units of 100 ns."""

        _fields_ = [
            ("created", ctypes.c_int64),
            ("accessed", ctypes.c_int64),
            ("written", ctypes.c_int64),
            ("changed", ctypes.c_int64),
            ("attributes", wintypes.DWORD),
        ]

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateFileW.restype = wintypes.HANDLE
    _kernel.CreateFileW.argtypes = [
        *(wintypes.LPCWSTR, wintypes.DWORD, wintypes.DWORD, wintypes.LPVOID),
        *(wintypes.DWORD, wintypes.DWORD, wintypes.HANDLE),
    ]
    _kernel.LockFileEx.argtypes = [
        *(wintypes.HANDLE, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD),
        ctypes.POINTER(Overlapped),
    ]

    _kernel.GetFileInformationByHandleEx.argtypes = [
        *(wintypes.HANDLE, ctypes.c_int, ctypes.POINTER(_BasicInformation), wintypes.DWORD),
    ]

    def system_error(number: int) -> OSError:
        """An error of the system, without the full stop that its messages end with: ours follows."""
        return ctypes.WinError(number, ctypes.FormatError(number).rstrip(". "))

    def opened_handle(path: str, access: int, disposition: int, flags: int = 0) -> int:
        """Open a file by CreateFileW, and let others do with it what they like.

        Raises:
            OSError: it cannot be opened.
        """
        handle: int | None = _kernel.CreateFileW(path, access, _SHARE_ALL, None, disposition, flags, None)
        if handle is None or handle == _INVALID_HANDLE:
            raise system_error(ctypes.get_last_error())
        return handle

    def open_to_read(path: str, _flags: int = 0) -> int:
        """A descriptor of a file that may be renamed and removed meanwhile."""
        return msvcrt.open_osfhandle(opened_handle(path, GENERIC_READ, OPEN_EXISTING), os.O_RDONLY)

    def open_to_write(path: str, _flags: int = 0) -> int:
        """As `open_to_read`; the file is made if there is none, and otherwise left as it is."""
        return msvcrt.open_osfhandle(opened_handle(path, GENERIC_WRITE, _OPEN_ALWAYS), os.O_WRONLY)

    def lock(descriptor: int) -> bool | None:
        """Lock an open file: False if another holds the lock, None if files cannot be locked here."""
        place = Overlapped(0, 0, 0, _BEHIND_ALL, None)
        handle = msvcrt.get_osfhandle(descriptor)
        if _kernel.LockFileEx(handle, _EXCLUSIVE_AT_ONCE, 0, 1, 0, ctypes.byref(place)):
            return True
        return False if ctypes.get_last_error() in (_REFUSED, _PENDING) else None

    def replace(source: Path, target: Path) -> None:
        """Rename a file, in place of another; one that is being read is waited for.

        Raises:
            OSError: that is impossible; PermissionError if the other is read for long.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                source.replace(target)
                return
            except PermissionError:
                if time.monotonic() > until or not source.exists():
                    raise
            time.sleep(_PAUSE_S)

    def occupied(status: os.stat_result) -> int:
        """Bytes that a file takes on its disk."""
        return status.st_size

    def status_and_change(file: Path | int) -> tuple[os.stat_result, int]:
        """The status of a path or descriptor, and when content or status last changed (ns since 1970).

        File systems that know no such time, such as FAT, say when the content was modified.

        Raises:
            OSError: there is no such file.
        """
        if isinstance(file, Path):
            handle = opened_handle(str(file), _READ_ATTRIBUTES, OPEN_EXISTING)
            descriptor = msvcrt.open_osfhandle(handle, os.O_RDONLY)
            try:
                return status_and_change(descriptor)
            finally:
                os.close(descriptor)
        status, basic = os.fstat(file), _BasicInformation()
        handle = msvcrt.get_osfhandle(file)
        size = ctypes.sizeof(basic)
        if not _kernel.GetFileInformationByHandleEx(handle, _BASIC_INFORMATION, ctypes.byref(basic), size):
            raise system_error(ctypes.get_last_error())
        return status, (basic.changed - _EPOCH) * 100 if basic.changed else status.st_mtime_ns

else:
    import fcntl

    def open_to_read(path: str, _flags: int = 0) -> int:
        """A descriptor of a file that may be renamed and removed meanwhile."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_to_write(path: str, _flags: int = 0) -> int:
        """As `open_to_read`; the file is made if there is none, and otherwise left as it is."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def lock(descriptor: int) -> bool | None:
        """Lock an open file: False if another holds the lock, None if files cannot be locked here."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def replace(source: Path, target: Path) -> None:
        """Rename a file, in place of another.

        Raises:
            OSError: that is impossible.
        """
        source.replace(target)

    def occupied(status: os.stat_result) -> int:
        """Bytes that a file takes on its disk."""
        return status.st_blocks * 512

    def status_and_change(file: Path | int) -> tuple[os.stat_result, int]:
        """The status of a path or descriptor, and when content or status last changed (ns since 1970).

        Raises:
            OSError: there is no such file.
        """
        status = os.stat(file)  # noqa: PTH116 (a path or a descriptor)
        return status, status.st_ctime_ns
