"""The CPU's extra buffer types, and which of them llama.cpp's loader may use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from edgespec.kernels.ggml.functions import cpu_device, functions
from edgespec.kernels.ggml.structs import POINTER, Address, Override, UnsupportedBuild


@cache
def extra_buffer_types() -> tuple[Address, ...]:
    """The CPU's buffer types other than the plain one, in ggml's order."""
    return offered_buffer_types()  # cached before the first change


def offered_buffer_types() -> tuple[Address, ...]:
    """The extra buffer types that llama.cpp chooses from at present, in the order in which it tries them."""
    table = _extra_table()
    found: list[Address] = []
    while table and table[len(found)]:
        found.append(table[len(found)])
    return tuple(found)


def offer_buffer_types(wanted: Sequence[Address]) -> None:
    """Make llama.cpp choose from these extra buffer types, in this order, when it loads models from now on.

    For each tensor it takes the first type that can hold it, and has no option to exclude one. But the table
    that it searches is writable and ends at the first null.

    Args:
        wanted: some of `extra_buffer_types`.

    Raises:
        UnsupportedBuild: the table is a different one each time.
    """
    available = extra_buffer_types()
    if offered_buffer_types() == tuple(wanted):
        return
    table = _extra_table()
    for index in range(len(available)):
        table[index] = wanted[index] if index < len(wanted) else None
    if offered_buffer_types() != tuple(wanted):
        raise UnsupportedBuild("the list of its kernel layouts cannot be changed")


def _extra_table() -> Any:
    """ggml's own array of extra buffer types, ended by a null; None if it has none."""
    f = functions()
    registry = f["ggml_backend_dev_backend_reg"](cpu_device())
    address = f["ggml_backend_reg_get_proc_address"](registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    lookup = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)(address)
    return lookup(cpu_device())


def overrides(patterns: list[tuple[str, Address]]) -> ctypes.Array[Override]:
    """llama.cpp's list of (regular expression over tensor names, buffer type), ended by an empty entry."""
    table = (Override * (len(patterns) + 1))()
    for entry, (pattern, buffer_type) in zip(table, patterns, strict=False):
        entry.pattern, entry.buffer_type = pattern.encode(), buffer_type
    return table


@cache
def plain_buffer_type() -> Address:
    """A buffer type of plain memory other than the CPU's default one.

    If overridden with the default one, llama.cpp's loader would consider the extra types after all.
    """
    f = functions()
    memory = ctypes.create_string_buffer(4096)
    aligned = -(-ctypes.addressof(memory) // 64) * 64
    buffer = f["ggml_backend_cpu_buffer_from_ptr"](aligned, 64)
    try:
        found: Address = f["ggml_backend_buffer_get_type"](buffer)
        return found
    finally:
        f["ggml_backend_buffer_free"](buffer)


def device_named(name: str) -> Address | None:
    """The device that ggml calls so, such as "CUDA0"; None if there is none."""
    f = functions()
    for index in range(f["ggml_backend_dev_count"]()):
        device: Address = f["ggml_backend_dev_get"](index)
        if name_of_device(device) == name:
            return device
    return None


def name_of_device(device: Address) -> str:
    """ggml's name of a device, such as "CUDA0"."""
    return (functions()["ggml_backend_dev_name"](device) or b"").decode("utf-8", "replace")


def pinned_memory_name(device: Address) -> str:
    """ggml's name of memory that is pinned for a device's transfers; empty if the device has none."""
    f = functions()
    kind = f["ggml_backend_dev_host_buffer_type"](device)
    return (f["ggml_backend_buft_name"](kind) or b"").decode("utf-8", "replace") if kind else ""


def pinned_buffer(device: Address, n_bytes: int) -> Address | None:
    """A buffer of memory that is pinned for a device's transfers; None if it has none, or not as much.

    ggml allocates other memory where none can be pinned, and says nothing.
    """
    f = functions()
    kind = f["ggml_backend_dev_host_buffer_type"](device)
    buffer: Address | None = f["ggml_backend_buft_alloc_buffer"](kind, n_bytes) if kind else None
    if buffer and f["ggml_backend_buffer_get_type"](buffer) != kind:
        f["ggml_backend_buffer_free"](buffer)
        return None
    return buffer or None
