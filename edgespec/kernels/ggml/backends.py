"""ggml's backends where they are libraries of their own, one for each kind of processor."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp

from edgespec.errors import BackendError
from edgespec.installation import install_command
from edgespec.kernels.ggml.structs import POINTER, SIZE, UnsupportedBuild

_CPU = 0  # ggml's number of this kind of device
_PREFIX = "ggml-cpu-"
_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)


def libraries_folder() -> Path:
    """The folder that llama.cpp's libraries were loaded from."""
    return Path(llama_cpp.llama_cpp._base_path)


@cache
def load_backends() -> None:
    """Have ggml load its backends, unless they are part of the build; the processor's is the best it can use.

    Raises:
        BackendError: there is none for this processor.
        UnsupportedBuild: this build has no such functions.
    """
    library = llama_cpp.llama_cpp._lib
    try:
        count = ctypes.CFUNCTYPE(SIZE)(("ggml_backend_reg_count", library))
        device = ctypes.CFUNCTYPE(POINTER, ctypes.c_int)(("ggml_backend_dev_by_type", library))
        load = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(("ggml_backend_load_all_from_path", library))
        log_get = ctypes.CFUNCTYPE(None, POINTER, POINTER)(("ggml_log_get", library))
        log_set = ctypes.CFUNCTYPE(None, POINTER, POINTER)(("ggml_log_set", library))
    except AttributeError as error:
        raise UnsupportedBuild(f"it lacks a function of ggml's: {error}") from error
    if count():
        return
    # ggml prints which libraries it loads.
    silent = _LOG_CALLBACK(lambda _level, _text, _data: None)
    function, data = POINTER(), POINTER()
    log_get(ctypes.byref(function), ctypes.byref(data))
    log_set(ctypes.cast(silent, POINTER), None)
    try:
        load(str(libraries_folder()).encode())
    finally:
        log_set(function, data)
    if not device(_CPU):
        raise BackendError(
            f"llama.cpp has no kernels for this processor in '{libraries_folder()}'.",
            f"Compile it here: {install_command(rebuild=True)}",
        )


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", POINTER),
        ("symbol", ctypes.c_char_p),
        ("address", POINTER),
    ]


def library_of(function: int) -> Path | None:
    """The library that holds a function; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    dladdr: Any = ctypes.CDLL(None).dladdr
    info = _DlInfo()
    if not dladdr(POINTER(function), ctypes.byref(info)) or not info.file:
        return None
    return Path(info.file.decode("utf-8", "surrogateescape"))


def variant_of(library: Path | None) -> str:
    """The kind of processor that a library of ggml's is for, such as "haswell"; empty if for the only one."""
    return library.stem.partition(_PREFIX)[2] if library is not None else ""
