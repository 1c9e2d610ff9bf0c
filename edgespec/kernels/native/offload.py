"""Operations with weights in memory that a device takes over, or leaves to the processor: see offload.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnsupportedBuild
from edgespec.kernels.ggml.structs import (
    BackendDevice,
    BufferType,
    BufferTypeInterface,
    DeviceInterface,
    require_same,
)
from edgespec.kernels.native.library import compiled_functions

_P = ctypes.c_void_p
_ACCELERATOR = 3  # ggml's kind of device that computes in the processor's memory, such as BLAS


class _Operations(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("product", "indexed_product", "rows")]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "offload_install": (ctypes.c_int, [_P, _P, ctypes.POINTER(_Operations)]),
    "offload_rearranged": (ctypes.c_int, [_P, _P]),
    "offload_from": (None, [ctypes.c_int64, ctypes.c_int]),
}


class SentProducts:
    """Products that are sent to devices in blocks of the thread that has ggml compute.

    Args:
        functions: of the compiled library.
        least_rows: from how many rows on weights in memory are sent.

    Attributes:
        rearranged: whether rearranged ones are sent, too, so that somebody must write over the copies.
    """

    def __init__(self, functions: dict[str, Any], least_rows: int, *, rearranged: bool) -> None:
        self._set = functions["offload_from"]
        self._least = least_rows
        self.rearranged = rearranged

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A block in which devices are asked so. Blocks of one thread are not nested."""
        self._set(self._least, self.rearranged)
        try:
            yield
        finally:
            self._set(0, False)


def keep_views(devices: Sequence[Address]) -> bool:
    """Have devices refuse what reads views of a layer's weights in memory; True if all of them do.

    ggml's scheduler may otherwise give them to any device, with copies of the views that nobody knows of.
    """
    f = _library()
    if f is None:
        return not devices
    operations = _Operations(ggml.product(), ggml.indexed_product(), ggml.rows_operation())
    try:
        for device in devices:
            _check(device)
            functions = device + DeviceInterface.supports_op.offset
            if not f["offload_install"](device, functions, ctypes.byref(operations)):
                return False
    except UnsupportedBuild:
        return False
    return True


def sent_products(
    devices: Sequence[Address], least_rows: int, layouts: Sequence[Address] = ()
) -> SentProducts | None:
    """Have devices take over products in so many rows; None if this build decides that by itself.

    Args:
        layouts: buffer types of rearranged weights that may be sent, too.
    """
    f = _library()
    if f is None or not keep_views(devices):
        return None
    for layout in layouts:
        slot = ctypes.addressof(BufferType.from_address(layout)) + BufferTypeInterface.is_host.offset
        if not f["offload_rearranged"](layout, slot):
            return None
    return SentProducts(f, least_rows, rearranged=bool(layouts))


def can_be_set() -> bool:
    """True if this installation can say which products are sent.

    The scheduler asks no device about those that an accelerator computes, and an accelerator would read
    rearranged weights as if they were not.
    """
    f = ggml.functions()
    kinds = [
        f["ggml_backend_dev_type"](f["ggml_backend_dev_get"](n)) for n in range(f["ggml_backend_dev_count"]())
    ]
    return _library() is not None and _ACCELERATOR not in kinds


@cache
def _check(device: Address) -> None:
    """Compare fields around those that are replaced with what ggml's public functions say.

    Raises:
        UnsupportedBuild: something is not where it is expected.
    """
    ggml.check()
    f, interface = ggml.functions(), BackendDevice.from_address(device).interface
    kind = ctypes.CFUNCTYPE(_P, _P)(interface.get_buffer_type)(device)
    require_same("a device's buffer type", kind, f["ggml_backend_dev_buffer_type"](device))
    supports = ctypes.CFUNCTYPE(ctypes.c_bool, _P, _P)(interface.supports_buft)(device, kind)
    require_same("whether a device can use its own memory", supports, True)


@cache
def _library() -> dict[str, Any] | None:
    """The compiled functions; None if they were not compiled."""
    return compiled_functions(_FUNCTIONS)
