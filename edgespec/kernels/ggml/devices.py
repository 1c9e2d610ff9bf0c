"""ggml's devices on this machine: the processor and, in some builds, graphics cards."""

from __future__ import annotations

from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import Address


def device_named(name: str) -> Address | None:
    """The device that ggml calls so, such as "CUDA0"; None if there is none."""
    f = functions()
    for index in range(f["ggml_backend_dev_count"]()):
        device: Address = f["ggml_backend_dev_get"](index)
        if (f["ggml_backend_dev_name"](device) or b"").decode("utf-8", "replace") == name:
            return device
    return None


def pinned_memory_name(device: Address) -> str:
    """ggml's name of memory that is pinned for a device's transfers; empty if the device has none."""
    f = functions()
    kind = f["ggml_backend_dev_host_buffer_type"](device)
    return (f["ggml_backend_buft_name"](kind) or b"").decode("utf-8", "replace") if kind else ""
