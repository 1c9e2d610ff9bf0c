"""Aborting a decode from another thread or a signal handler."""

from __future__ import annotations

import ctypes
from typing import Any

from edgespec.base.libraries import c_library
from edgespec.kernels.bindings import llama_cpp


class DecodeAborted(Exception):
    """The decode was aborted."""


class AbortFlag:
    """Aborts running decodes within one graph node; safe to use from threads and signal handlers.

    llama.cpp calls its abort callback for every graph node. A Python callback would take the interpreter lock
    a thousand times a pass, so the callback is C's strlen, which costs nothing: strlen("") is 0, or false,
    and strlen("x") is 1, or true.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def set(self) -> None:
        """Abort what is running, and whatever is started before `clear`."""
        self._text[0] = b"x"

    def clear(self) -> None:
        """Allow decodes again."""
        self._text[0] = b"\x00"

    @property
    def is_set(self) -> bool:
        """True if decodes are being aborted."""
        return self._text[0] != b"\x00"

    def check(self) -> None:
        """Raise `DecodeAborted` if decodes are being aborted."""
        if self.is_set:
            raise DecodeAborted

    def install(self, params: Any) -> None:
        """Make a context's decodes obey this flag, if the C library's strlen can be found."""
        try:
            address: Any = ctypes.cast(c_library().strlen, ctypes.c_void_p).value
        except (OSError, AttributeError):
            return  # decodes are then aborted between passes only
        params.abort_callback = llama_cpp.ggml_abort_callback(address)
        params.abort_callback_data = ctypes.addressof(self._text)
