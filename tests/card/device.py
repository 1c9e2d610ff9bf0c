"""The card in a process: its device in ggml, a worker that stands in for one, and memory taken from it.

python -m tests.card.device NAME BYTES     holds all of its memory but BYTES, until standard input ends
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any

import llama_cpp

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, rpc
from edgespec.kernels.ggml.buffer_types import device_named
from edgespec.llama.runtime.backend import start_backend

STAND_IN = "EDGESPEC_CARD_ADDRESS"  # of a worker that stands in for a card, "host:port"
_STEP = 256 << 20
_SOFTWARE = ("llvmpipe", "swiftshader")  # in the descriptions of Vulkan devices


def card(name: str) -> Address:
    """ggml's device of this name, in this process for the first time."""
    start_backend()
    if address := os.environ.get(STAND_IN):
        (device,) = rpc.connect(address)
        function("ggml_backend_device_register", None, ctypes.c_void_p)(device)
    found = device_named(name)
    if found is None:
        raise SystemExit(f"llama.cpp finds no device {name} here")
    return found


def function(name: str, result: object, *arguments: object) -> object:
    """A function of ggml that EdgeSpec does not use."""
    return ctypes.CFUNCTYPE(result, *arguments)((name, llama_cpp.llama_cpp._lib))  # type: ignore[arg-type]


def free_bytes(device: Address) -> int:
    """Bytes of a device's memory that are free."""
    return rpc.describe(device).free


class FreeMemoryUnknown(Exception):
    """A device that says the same number of free bytes whatever is allocated."""


def is_software(device: Mapping[str, Any]) -> bool:
    """Whether a listed device computes on the processor."""
    description = device["description"].lower()
    return device.get("kind") == "cpu" or any(name in description for name in _SOFTWARE)


def take_all_but(device: Address, n_bytes: int) -> list[Address]:
    """Allocate a device's memory until so many bytes are free; returns the buffers.

    Raises:
        FreeMemoryUnknown: the device does not say how much is left.
    """
    f = ggml.functions()
    kind = f["ggml_backend_dev_buffer_type"](device)
    taken = []
    while (excess := free_bytes(device) - n_bytes) > _STEP // 4:
        size = excess if excess < 4 * _STEP else excess - _STEP
        buffer = f["ggml_backend_buft_alloc_buffer"](kind, size)
        if not buffer:
            break
        taken.append(buffer)
        if free_bytes(device) - n_bytes >= excess:
            for each in taken:
                f["ggml_backend_buffer_free"](each)
            raise FreeMemoryUnknown("this device does not tell how much of its memory is free")
    return taken


def main() -> None:
    """Hold memory."""
    name, left = sys.argv[1], int(sys.argv[2])
    device = card(name)
    held = take_all_but(device, left)
    print(free_bytes(device), len(held), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
