"""Stopping a decode from another thread or a signal handler."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import llama_cpp


class DecodeAborted(Exception):
    """The pass was stopped from outside."""


class AbortFlag:
    """Ends running decodes from outside, within one graph node; safe from threads and signal handlers.

    llama.cpp asks its abort callback once a graph node. C code that reads one byte keeps that free, where
    a Python callback would take the interpreter lock a thousand times a pass: strlen("") is 0, false, and
    strlen("x") is 1, true.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def set(self) -> None:
        """End what runs, and what is started before `clear`."""
        self._text[0] = b"x"

    def clear(self) -> None:
        """Let decodes run again."""
        self._text[0] = b"\x00"

    @property
    def is_set(self) -> bool:
        """Whether decodes are being ended."""
        return self._text[0] != b"\x00"

    def install(self, params: Any) -> None:
        """Have a context's decodes obey this flag, where there is a C library with a strlen."""
        try:
            library = ctypes.CDLL(None) if os.name == "posix" else ctypes.CDLL("msvcrt")
            address: Any = ctypes.cast(library.strlen, ctypes.c_void_p).value
        except (OSError, AttributeError):
            return  # decodes then end at the next pass
        params.abort_callback = llama_cpp.ggml_abort_callback(address)
        params.abort_callback_data = ctypes.addressof(self._text)
