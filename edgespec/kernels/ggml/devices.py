"""ggml's devices on this machine: the processor and, in some builds, graphics cards."""

from __future__ import annotations

from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import Address


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
