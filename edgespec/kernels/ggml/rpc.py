"""ggml's RPC backend: devices of other machines, and lending this machine's own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.kernels.ggml.checks import check
from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import (
    POINTER,
    SIZE,
    Address,
    BackendDevice,
    Buffer,
    BufferType,
    UnsupportedBuild,
    require_same,
)

_REGISTRY = b"RPC"


@dataclass(frozen=True)
class DeviceProperties:
    """ggml's facts about a device; `free` and `total` are bytes of its memory."""

    name: str
    description: str
    free: int
    total: int


def has_rpc() -> bool:
    """True if this build can lend devices to other machines, and borrow theirs."""
    return bool(functions()["ggml_backend_reg_by_name"](_REGISTRY))


def connect(endpoint: str) -> tuple[Address, ...]:
    """The devices of a server; ggml ends the process if there is none.

    Args:
        endpoint: "host:port".

    Raises:
        UnsupportedBuild: this build has no RPC backend.
    """
    f = functions()
    add = _function("ggml_backend_rpc_add_server", POINTER, ctypes.c_char_p)
    registry = add(endpoint.encode())
    if not registry:
        return ()
    count = f["ggml_backend_reg_dev_count"](registry)
    return tuple(f["ggml_backend_reg_dev_get"](registry, index) for index in range(count))


def own_devices() -> tuple[Address, ...]:
    """List this machine's devices: graphics cards, if ggml has any, and then the processor."""
    f = functions()
    found = [f["ggml_backend_dev_get"](index) for index in range(f["ggml_backend_dev_count"]())]
    kinds = {device: f["ggml_backend_dev_type"](device) for device in found}
    return tuple(sorted((d for d in found if kinds[d] in (0, 1, 2)), key=lambda d: kinds[d] == 0))


def describe(device: Address) -> DeviceProperties:
    """A device, as ggml knows it."""
    f = functions()
    free, total = SIZE(), SIZE()
    f["ggml_backend_dev_memory"](device, ctypes.byref(free), ctypes.byref(total))
    name, about = (
        (f[f"ggml_backend_dev_{what}"](device) or b"").decode("utf-8", "replace")
        for what in ("name", "description")
    )
    return DeviceProperties(name, about.strip(), free.value, total.value)


class LimitedMemory:
    """Keeps what clients allocate on a device within a limit, and has the device tell them that limit.

    By itself, ggml tells clients that all memory of a processor is free, whatever other programs or a
    control group leave of it, and allocates whatever they ask for.

    Args:
        most: called for the bytes that may be lent, when nothing is.
        available: called for the bytes that are available now.
        on_failure: told why nothing is lent for now: what the other functions raised when ggml asked.

    Raises:
        UnsupportedBuild: devices or buffers are laid out differently in this build.
    """

    def __init__(
        self,
        device: Address,
        most: Callable[[], int],
        available: Callable[[], int],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._most = most
        self._available = available
        self._on_failure = on_failure
        self._lendable = most()
        self._lent: dict[Address, tuple[int, Any]] = {}  # by buffer: its size, and how it is freed
        known = describe(device)
        layout = BackendDevice.from_address(device)
        kind = ctypes.CFUNCTYPE(None, POINTER, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE))
        there, total = SIZE(), SIZE()
        kind(layout.interface.get_memory)(device, ctypes.byref(there), ctypes.byref(total))
        require_same("a device's memory", total.value, known.total)

        def limited(_device: Any, free_there: Any, total_there: Any) -> None:
            free_there[0] = min(self._free_or_none(), known.total)
            total_there[0] = known.total

        buffer_type = functions()["ggml_backend_dev_buffer_type"](device)
        check()  # that buffers are laid out as below
        interface = BufferType.from_address(buffer_type).interface
        allocating, freeing = ctypes.CFUNCTYPE(POINTER, POINTER, SIZE), ctypes.CFUNCTYPE(None, POINTER)
        allocate = allocating(interface.alloc_buffer)

        def allocate_within(buffer_type: Address, size: int) -> Address | None:
            if size > self._free_or_none():
                return None  # ggml then answers that there is no buffer
            buffer: Address | None = allocate(buffer_type, size)
            if buffer:
                ours = Buffer.from_address(buffer).interface
                self._lent[buffer] = size, freeing(ours.free_buffer)
                ours.free_buffer = ctypes.cast(self._kept[2], POINTER).value
            return buffer

        def free(buffer: Address) -> None:
            _, as_before = self._lent.pop(buffer)
            as_before(buffer)

        self._kept = kind(limited), allocating(allocate_within), freeing(free)  # ggml keeps only addresses
        layout.interface.get_memory = ctypes.cast(self._kept[0], POINTER).value
        interface.alloc_buffer = ctypes.cast(self._kept[1], POINTER).value

    def _free_or_none(self) -> int:
        """Bytes that may still be lent: none if that is unknown, as C cannot be told why."""
        try:
            return self.free()
        except Exception as error:
            self._on_failure(error)
            return 0

    def free(self) -> int:
        """Bytes that may still be lent."""
        if not self._lent:
            self._lendable = self._most()
        lent = sum(size for size, _ in self._lent.values())
        return max(0, min(self._lendable - lent, self._available()))


def lend(endpoint: str, devices: Sequence[Address], n_threads: int) -> None:
    """Serve one client after another; returns only if the address cannot be listened on.

    Args:
        endpoint: "host:port", the host as an IPv4 address.

    Raises:
        UnsupportedBuild: this build has no RPC backend.
    """
    start = _function(
        "ggml_backend_rpc_start_server", None, ctypes.c_char_p, ctypes.c_char_p, SIZE, SIZE, POINTER
    )
    table = (POINTER * len(devices))(*devices)
    start(endpoint.encode(), None, n_threads, len(devices), ctypes.cast(table, POINTER))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    f = functions()
    registry = f["ggml_backend_reg_by_name"](_REGISTRY)
    address = f["ggml_backend_reg_get_proc_address"](registry, name.encode()) if registry else None
    if not address:
        raise UnsupportedBuild("it was compiled without GGML_RPC")
    return ctypes.CFUNCTYPE(result, *arguments)(address)
