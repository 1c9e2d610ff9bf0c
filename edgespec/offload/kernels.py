"""The CPU's kernel layouts: which weights ggml can rearrange for its fastest kernels, and doing so.

Which layout a weight takes is asked of ggml in the way llama.cpp asks when it loads a model, so that
weights rearranged here are, byte for byte, those of a model that is loaded the usual way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from edgespec.offload import ggml
from edgespec.offload.ggml import Address

_ROWS = 512  # of activations, in the question; any number would do


@dataclass(frozen=True)
class KernelLayout:
    """An extra CPU buffer type, by ggml's name for it."""

    name: str
    address: Address

    def packed_bytes(self, type_id: int, shape: tuple[int, ...]) -> int:
        """Bytes of a weight in this layout."""
        with ggml.Scratch() as scratch:
            tensor = scratch.tensor(type_id, shape)
            return int(ggml.functions()["ggml_backend_buft_get_alloc_size"](self.address, tensor))

    def pack(self, type_id: int, shape: tuple[int, ...], weights: Address, n_bytes: int) -> bytes:
        """A weight's bytes in this layout, from its `n_bytes` bytes in the file's layout."""
        with self.packed(type_id, shape, weights, n_bytes) as view:
            return bytes(view)

    @contextmanager
    def packed(
        self, type_id: int, shape: tuple[int, ...], weights: Address, n_bytes: int
    ) -> Iterator[memoryview]:
        """The same without a copy: a view that is valid while the block runs."""
        f = ggml.functions()
        with ggml.Scratch() as scratch:
            tensor = scratch.tensor(type_id, shape)
            size = f["ggml_backend_buft_get_alloc_size"](self.address, tensor)
            # Some layouts do not fill their last bytes, which would make the file's bytes vary.
            buffer = f["ggml_backend_buft_alloc_buffer"](self.address, size + 4096)
            if not buffer:
                raise MemoryError(f"no {size} bytes to rearrange a weight in")
            try:
                base = f["ggml_backend_buffer_get_base"](buffer)
                ctypes.memset(base, 0, size)
                f["ggml_backend_tensor_alloc"](buffer, tensor, base)
                f["ggml_backend_tensor_set"](tensor, weights, 0, n_bytes)
                with memoryview((ctypes.c_uint8 * size).from_address(base)).cast("B") as view:
                    yield view
            finally:
                f["ggml_backend_buffer_free"](buffer)


@cache
def kernel_layouts() -> tuple[KernelLayout, ...]:
    """The layouts that this CPU has kernels for, the preferred ones first."""
    f = ggml.functions()
    device = ggml.cpu_device()
    registry = f["ggml_backend_dev_backend_reg"](device)
    address = f["ggml_backend_reg_get_proc_address"](registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return ()
    lookup = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    table = lookup(device)
    found: list[KernelLayout] = []
    while table and table[len(found)]:
        name = f["ggml_backend_buft_name"](table[len(found)])
        found.append(KernelLayout(name.decode(), table[len(found)]))
    return tuple(found)


@cache
def kernel_layout(type_id: int, shape: tuple[int, ...]) -> KernelLayout | None:
    """The layout llama.cpp would give a matrix of a layer; None where the file's own is used.

    A matrix multiplies activations; a stack of them, as experts have, is multiplied by index.
    """
    if len(shape) not in (2, 3):
        return None
    f = ggml.functions()
    with ggml.Scratch() as scratch:
        weight = scratch.tensor(type_id, shape)
        if len(shape) == 2:
            rows = scratch.tensor(ggml.F32, (shape[0], _ROWS))
            product = f["ggml_mul_mat"](scratch.handle, weight, rows)
        else:
            rows = scratch.tensor(ggml.F32, (shape[0], 1, _ROWS))
            indices = scratch.tensor(ggml.I32, (1, _ROWS))
            product = f["ggml_mul_mat_id"](scratch.handle, weight, rows, indices)
        for layout in kernel_layouts():
            buffer = f["ggml_backend_buft_alloc_buffer"](layout.address, 0)
            ggml.set_buffer(weight, buffer)
            supported = f["ggml_backend_dev_supports_op"](ggml.cpu_device(), product)
            ggml.set_buffer(weight, None)
            f["ggml_backend_buffer_free"](buffer)
            if supported:
                return layout
    return None
