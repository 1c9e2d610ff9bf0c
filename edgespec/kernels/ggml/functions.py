"""ggml's public functions, found through llama.cpp's library, with their types declared."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.base.installation import install_command
from edgespec.base.libraries import library_of
from edgespec.errors import BackendError
from edgespec.kernels.bindings import llama_cpp, load_shared_library
from edgespec.kernels.ggml.structs import (
    POINTER,
    SIZE,
    Address,
    BackendRegistry,
    ContextParams,
    UnsupportedBuild,
)

_CPU = 0  # ggml's number of this kind of device
_PREFIX = "ggml-cpu-"
_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)


def libraries_folder() -> Path:
    """The folder that llama.cpp's libraries were loaded from."""
    return Path(llama_cpp.llama_cpp._base_path)


def exported(name: str) -> tuple[str, ctypes.CDLL]:
    """A function of llama.cpp's or ggml's libraries, as prototypes of ctypes take it.

    Each prototype makes a function object of its own, so that declaring its types does not affect other users
    of the library.

    Raises:
        AttributeError: none of them has it.
    """
    library = llama_cpp.llama_cpp._lib  # depends on ggml's, which all systems but Windows then look into, too
    if not hasattr(library, name):
        library = next((each for each in _ggml_libraries() if hasattr(each, name)), library)
    return name, library


@cache
def _ggml_libraries() -> list[ctypes.CDLL]:
    found = []
    for name in ("ggml", "ggml-base"):
        with suppress(FileNotFoundError, RuntimeError):
            found.append(load_shared_library(name, libraries_folder()))
    return found


@cache
def load_backends() -> None:
    """Have ggml load its backends, unless they are part of the build; the processor's is the best it can use.

    Raises:
        BackendError: there is none for this processor.
        UnsupportedBuild: this build has no such functions.
    """
    try:
        count = ctypes.CFUNCTYPE(SIZE)(exported("ggml_backend_reg_count"))
        device = ctypes.CFUNCTYPE(POINTER, ctypes.c_int)(exported("ggml_backend_dev_by_type"))
        load = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(exported("ggml_backend_load_all_from_path"))
        log_get = ctypes.CFUNCTYPE(None, POINTER, POINTER)(exported("ggml_log_get"))
        log_set = ctypes.CFUNCTYPE(None, POINTER, POINTER)(exported("ggml_log_set"))
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


def variant_of(library: Path | None) -> str:
    """The kind of processor that a library of ggml's is for, such as "haswell"; empty if for the only one."""
    return library.stem.partition(_PREFIX)[2] if library is not None else ""


_CPU_DEVICE = 0

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (POINTER, [ContextParams]),
    "ggml_free": (None, [POINTER]),
    "ggml_tensor_overhead": (SIZE, []),
    "ggml_nbytes": (SIZE, [POINTER]),
    "ggml_get_name": (ctypes.c_char_p, [POINTER]),
    "ggml_get_data": (POINTER, [POINTER]),
    "ggml_set_name": (POINTER, [POINTER, ctypes.c_char_p]),
    "ggml_new_tensor": (POINTER, [POINTER, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]),
    "ggml_view_1d": (POINTER, [POINTER, POINTER, ctypes.c_int64, SIZE]),
    "ggml_mul_mat": (POINTER, [POINTER, POINTER, POINTER]),
    "ggml_mul_mat_id": (POINTER, [POINTER, POINTER, POINTER, POINTER]),
    "ggml_get_rows": (POINTER, [POINTER, POINTER, POINTER]),
    "ggml_quantize_chunk": (SIZE, [ctypes.c_int, *[POINTER] * 2, *[ctypes.c_int64] * 3, POINTER]),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, [ctypes.c_int]),
    "ggml_op_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_get_type_traits": (POINTER, [ctypes.c_int]),
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_graph_overhead_custom": (SIZE, [SIZE, ctypes.c_bool]),
    "ggml_new_graph_custom": (POINTER, [POINTER, SIZE, ctypes.c_bool]),
    "ggml_build_forward_expand": (None, [POINTER, POINTER]),
    "ggml_backend_dev_init": (POINTER, [POINTER, ctypes.c_char_p]),
    "ggml_backend_graph_compute": (ctypes.c_int, [POINTER, POINTER]),
    "ggml_backend_free": (None, [POINTER]),
    "ggml_backend_tensor_get": (None, [POINTER, POINTER, SIZE, SIZE]),
    "ggml_flash_attn_ext": (POINTER, [*[POINTER] * 5, *[ctypes.c_float] * 3]),
    "ggml_backend_cpu_buffer_type": (POINTER, []),
    "ggml_backend_cpu_buffer_from_ptr": (POINTER, [POINTER, SIZE]),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, [POINTER]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [POINTER]),
    "ggml_backend_buft_alloc_buffer": (POINTER, [POINTER, SIZE]),
    "ggml_backend_buft_get_alloc_size": (SIZE, [POINTER, POINTER]),
    "ggml_backend_buft_get_alignment": (SIZE, [POINTER]),
    "ggml_backend_buft_is_host": (ctypes.c_bool, [POINTER]),
    "ggml_backend_buffer_free": (None, [POINTER]),
    "ggml_backend_buffer_get_base": (POINTER, [POINTER]),
    "ggml_backend_buffer_get_size": (SIZE, [POINTER]),
    "ggml_backend_buffer_get_type": (POINTER, [POINTER]),
    "ggml_backend_buffer_set_usage": (None, [POINTER, ctypes.c_int]),
    "ggml_backend_tensor_alloc": (ctypes.c_int, [POINTER, POINTER, POINTER]),
    "ggml_backend_tensor_set": (None, [POINTER, POINTER, SIZE, SIZE]),
    "ggml_backend_buffer_clear": (None, [POINTER, ctypes.c_uint8]),
    "ggml_backend_dev_count": (SIZE, []),
    "ggml_backend_dev_get": (POINTER, [SIZE]),
    "ggml_backend_dev_type": (ctypes.c_int, [POINTER]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [POINTER]),
    "ggml_backend_dev_description": (ctypes.c_char_p, [POINTER]),
    "ggml_backend_dev_memory": (None, [POINTER, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE)]),
    "ggml_backend_dev_buffer_type": (POINTER, [POINTER]),
    "ggml_backend_dev_host_buffer_type": (POINTER, [POINTER]),
    "ggml_backend_reg_by_name": (POINTER, [ctypes.c_char_p]),
    "ggml_backend_reg_dev_count": (SIZE, [POINTER]),
    "ggml_backend_reg_dev_get": (POINTER, [POINTER, SIZE]),
    "ggml_backend_dev_by_type": (POINTER, [ctypes.c_int]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
    "ggml_backend_dev_backend_reg": (POINTER, [POINTER]),
    "ggml_backend_reg_get_proc_address": (POINTER, [POINTER, ctypes.c_char_p]),
}


@cache
def functions() -> dict[str, Any]:
    """ggml's public functions by name, with their types declared.

    Raises:
        UnsupportedBuild: one is missing.
        BackendError: there is no backend for this processor.
    """
    load_backends()
    found = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = ctypes.CFUNCTYPE(result, *arguments)(exported(name))
        except AttributeError as error:
            raise UnsupportedBuild(f"it has no {name}") from error
        found[name] = function
    # A backend's own functions are found through ggml alone where it is a library of its own.
    registry = found["ggml_backend_dev_backend_reg"](found["ggml_backend_dev_by_type"](_CPU_DEVICE))
    set_threads = found["ggml_backend_reg_get_proc_address"](registry, b"ggml_backend_set_n_threads")
    if not set_threads:
        raise UnsupportedBuild("it has no ggml_backend_set_n_threads")
    found["ggml_backend_cpu_set_n_threads"] = ctypes.CFUNCTYPE(None, POINTER, ctypes.c_int)(set_threads)
    return found


def cpu_device() -> Address:
    """ggml's CPU device."""
    device: Address = functions()["ggml_backend_dev_by_type"](_CPU_DEVICE)
    return device


@cache
def cpu_library() -> Path | None:
    """The library of ggml's CPU backend; None where the system does not tell."""
    registry = functions()["ggml_backend_dev_backend_reg"](cpu_device())
    return library_of(BackendRegistry.from_address(registry).get_name)


def cpu_variant() -> str:
    """The kind of processor that the CPU backend was chosen for, such as "haswell"; empty if there is one."""
    return variant_of(cpu_library())
