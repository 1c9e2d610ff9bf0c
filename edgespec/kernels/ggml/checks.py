"""Checks that this build's structures are laid out as `structs` says."""

from __future__ import annotations

import ctypes
from functools import cache

from edgespec.kernels.ggml.functions import cpu_device, functions
from edgespec.kernels.ggml.structs import (
    F32,
    INTERFACE_VERSION,
    OBJECT_BYTES,
    POINTER,
    SIZE,
    SOURCES,
    USAGE_WEIGHTS,
    Address,
    BackendRegistry,
    Buffer,
    BufferType,
    Tensor,
    require_same,
)
from edgespec.kernels.ggml.tensors import ScratchContext, read_node


@cache
def check() -> None:
    """Compare the structures above with what ggml's public functions say.

    Raises:
        UnsupportedBuild: something is not where it is expected.
    """
    f = functions()
    require_same("the size of a tensor", ctypes.sizeof(Tensor) + OBJECT_BYTES, f["ggml_tensor_overhead"]())
    registry = f["ggml_backend_dev_backend_reg"](cpu_device())
    require_same(
        "the interface version", BackendRegistry.from_address(registry).api_version, INTERFACE_VERSION
    )
    buffer_type = f["ggml_backend_cpu_buffer_type"]()
    interface = BufferType.from_address(buffer_type).interface
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, POINTER)(interface.get_name)(buffer_type)
    require_same("a buffer type's name", name, f["ggml_backend_buft_name"](buffer_type))
    is_host = ctypes.CFUNCTYPE(ctypes.c_bool, POINTER)(interface.is_host)(buffer_type)
    require_same("where a buffer type is", is_host, f["ggml_backend_buft_is_host"](buffer_type))
    alignment = ctypes.CFUNCTYPE(SIZE, POINTER)(interface.get_alignment)(buffer_type)
    require_same("a buffer type's alignment", alignment, f["ggml_backend_buft_get_alignment"](buffer_type))
    buffer = f["ggml_backend_buft_alloc_buffer"](buffer_type, 3 * 4096)
    try:
        _check_buffer(buffer, buffer_type)
        _check_tensor(buffer)
    finally:
        f["ggml_backend_buffer_free"](buffer)


def _check_buffer(buffer: Address, buffer_type: Address) -> None:
    f = functions()
    layout = Buffer.from_address(buffer)
    require_same("a buffer's type", layout.type, buffer_type)
    require_same("a buffer's size", layout.size, f["ggml_backend_buffer_get_size"](buffer))
    base = ctypes.CFUNCTYPE(POINTER, POINTER)(layout.interface.get_base)(buffer)
    require_same("a buffer's base", base, f["ggml_backend_buffer_get_base"](buffer))
    f["ggml_backend_buffer_set_usage"](buffer, USAGE_WEIGHTS)
    require_same("a buffer's usage", layout.usage, USAGE_WEIGHTS)


def _check_tensor(buffer: Address) -> None:
    f = functions()
    base = f["ggml_backend_buffer_get_base"](buffer)
    with ScratchContext() as scratch:
        tensor = scratch.tensor(F32, (32, 8), b"weight")
        layout = Tensor.from_address(tensor)
        f["ggml_backend_tensor_alloc"](buffer, tensor, base + 4096)
        require_same("a tensor's type", layout.type, F32)
        require_same("a tensor's buffer", layout.buffer, buffer)
        require_same("a tensor's shape", tuple(layout.ne), (32, 8, 1, 1))
        require_same("a tensor's strides", tuple(layout.nb), (4, 128, 1024, 1024))
        require_same("a tensor's data", layout.data, f["ggml_get_data"](tensor))
        require_same("a tensor's name", layout.name, f["ggml_get_name"](tensor))
        # set_tensor is the next function after memset_tensor: its effect shows that both are in place.
        values = (ctypes.c_float * 256)(*range(256))
        write = ctypes.CFUNCTYPE(None, POINTER, POINTER, POINTER, SIZE, SIZE)
        write(Buffer.from_address(buffer).interface.set_tensor)(buffer, tensor, values, 0, 1024)
        require_same("a tensor's values", ctypes.string_at(base + 4096, 1024), bytes(values))
        view = f["ggml_view_1d"](scratch.handle, tensor, 16, 64)
        sources = read_node(view)
        require_same("a view's source", sources[SOURCES : SOURCES + 2], (tensor, 64))
        product = f["ggml_mul_mat"](scratch.handle, tensor, scratch.tensor(F32, (32, 2), b"rows"))
        require_same("a node's source", read_node(product)[0], tensor)
