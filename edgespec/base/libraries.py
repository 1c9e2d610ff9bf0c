"""The C library, and the files that functions were loaded from."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

if sys.platform == "win32":
    from ctypes import wintypes

    _OF_ADDRESS_AS_IT_IS = 0x4 | 0x2
    _MAX_CHARS = 1 << 15

    def c_library() -> ctypes.CDLL:
        """The C library; raises OSError if it cannot be found."""
        return ctypes.CDLL("msvcrt")

    def library_of(function: int) -> Path | None:
        """The library that holds a function, by its address; None if the system does not tell."""
        kernel = ctypes.WinDLL("kernel32")
        kernel.GetModuleHandleExW.argtypes = [wintypes.DWORD, wintypes.LPVOID, wintypes.LPVOID]
        kernel.GetModuleFileNameW.argtypes = [wintypes.HMODULE, wintypes.LPWSTR, wintypes.DWORD]
        handle, name = wintypes.HMODULE(), ctypes.create_unicode_buffer(_MAX_CHARS)
        found = kernel.GetModuleHandleExW(_OF_ADDRESS_AS_IT_IS, function, ctypes.byref(handle))
        return Path(name.value) if found and kernel.GetModuleFileNameW(handle, name, _MAX_CHARS) else None

else:

    class _DlInfo(ctypes.Structure):
        _fields_ = [
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        ]

    def c_library() -> ctypes.CDLL:
        """The C library; raises OSError if it cannot be found."""
        return ctypes.CDLL(None)

    def library_of(function: int) -> Path | None:
        """The library that holds a function, by its address; None if the system does not tell."""
        info = _DlInfo()
        found = c_library().dladdr(ctypes.c_void_p(function), ctypes.byref(info))
        return Path(info.file.decode("utf-8", "surrogateescape")) if found and info.file else None
