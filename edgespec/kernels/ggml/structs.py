"""ggml's C structures, and what to raise where this build's are laid out differently.

They are those of ggml-backend-impl.h (interface version 2) and ggml.h. ggml makes no promise about their
layout, so `checks.check` compares them with what ggml's public functions say about real objects.
"""

from __future__ import annotations

import ctypes
from typing import Any

POINTER = ctypes.c_void_p
SIZE = ctypes.c_size_t

INTERFACE_VERSION = 2
OBJECT_BYTES = 32  # sizeof(struct ggml_object), which precedes every tensor in a ggml context
SOURCES = 10
USAGE_WEIGHTS = 1
_CPU_DEVICE = 0
F32, F16, I32 = 0, 1, 26

Address = int


class UnsupportedBuild(Exception):
    """EdgeSpec cannot reach into this llama.cpp build, or stream its weights; the text says why."""


def pointer_fields(*names: str) -> list[tuple[str, Any]]:
    return [(name, POINTER) for name in names]


class BufferTypeInterface(ctypes.Structure):
    _fields_ = pointer_fields(
        "get_name", "alloc_buffer", "get_alignment", "get_max_size", "get_alloc_size", "is_host"
    )


class BufferType(ctypes.Structure):
    _fields_ = [("interface", BufferTypeInterface), *pointer_fields("device", "context")]


class BufferInterface(ctypes.Structure):
    _fields_ = pointer_fields(
        *("free_buffer", "get_base", "init_tensor", "memset_tensor", "set_tensor", "get_tensor"),
        *("set_tensor_2d", "get_tensor_2d", "cpy_tensor", "clear", "reset"),
    )


class Buffer(ctypes.Structure):
    _fields_ = [
        ("interface", BufferInterface),
        *pointer_fields("type", "context"),
        ("size", SIZE),
        ("usage", ctypes.c_int),
    ]


class DeviceInterface(ctypes.Structure):
    """ggml_backend_device_i."""

    _fields_ = pointer_fields(
        "get_name",
        "get_description",
        "get_memory",
        "get_type",
        "get_props",
        "init_backend",
        "get_buffer_type",
        "get_host_buffer_type",
        "buffer_from_host_ptr",
        "supports_op",
        "supports_buft",
        "offload_op",
        "event_new",
        "event_free",
        "event_synchronize",
    )


class BackendDevice(ctypes.Structure):
    """Its beginning."""

    _fields_ = [("interface", DeviceInterface)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", POINTER),
        ("ne", ctypes.c_int64 * 4),
        ("nb", SIZE * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", POINTER * SOURCES),
        ("view_src", POINTER),
        ("view_offs", SIZE),
        ("data", POINTER),
        ("name", ctypes.c_char * 64),
        ("extra", POINTER),
        ("padding", ctypes.c_char * 8),
    ]


class BackendRegistry(ctypes.Structure):
    """The beginning of ggml_backend_reg."""

    _fields_ = [("api_version", ctypes.c_int), *pointer_fields("get_name")]


class TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


class ContextParams(ctypes.Structure):
    _fields_ = [("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool)]


class Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", POINTER)]


def require_same(what: str, found: Any, expected: Any) -> None:
    """Refuse the build if `found` is not `expected`.

    Raises:
        UnsupportedBuild: naming both.
    """
    if found != expected:
        raise UnsupportedBuild(f"{what} is {found}, and {expected} was expected")
