"""The CPU's kernel layouts: which weights ggml can rearrange for its fastest kernels, and doing so.

Whether a layout can hold a weight is asked of ggml in the way llama.cpp asks when it loads a model, so
that weights rearranged here are, byte for byte, those of a model that is loaded the usual way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from edgespec.errors import BackendError
from edgespec.kernels.setting import allowed_layouts
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
                return ctypes.string_at(base, size)
            finally:
                f["ggml_backend_buffer_free"](buffer)


@cache
def available_layouts() -> tuple[KernelLayout, ...]:
    """The layouts that llama.cpp has kernels for on this processor, in ggml's order."""
    return tuple(
        KernelLayout(ggml.functions()["ggml_backend_buft_name"](address).decode(), address)
        for address in ggml.extra_buffer_types()
    )


def kernel_layouts() -> tuple[KernelLayout, ...]:
    """The layouts in use, in ggml's order.

    Raises:
        UsageError: EDGESPEC_KERNELS asks for one that is not available.
    """
    allowed = allowed_layouts([layout.name for layout in available_layouts()])
    return tuple(layout for layout in available_layouts() if layout.name in allowed)


def kernel_layout(type_id: int, shape: tuple[int, ...]) -> KernelLayout | None:
    """The layout for a matrix of a layer; None where the file's own is used.

    A matrix multiplies activations; a stack of them, as experts have, is multiplied by index.

    Raises:
        UsageError: as kernel_layouts.
    """
    return _first_layout(kernel_layouts(), type_id, shape)


def kernels_identity() -> str:
    """Names the layouts in use: kernels of different layouts round differently.

    Raises:
        UsageError: as kernel_layouts.
    """
    return "+".join(layout.name for layout in kernel_layouts()) or "plain"


def restrict_loader() -> bool:
    """Let llama.cpp's loader see the layouts in use and no others.

    Returns:
        Whether there are any: what `use_extra_bufts` should be.

    Raises:
        UsageError: as kernel_layouts.
        BackendError: llama.cpp cannot be told.
    """
    layouts = kernel_layouts()
    if layouts:
        try:
            ggml.offer_buffer_types([layout.address for layout in layouts])
        except ggml.UnsupportedBuild as error:
            raise BackendError(
                f"A choice of kernel layouts is not possible with this llama.cpp build: {error}.",
                "Set EDGESPEC_KERNELS=plain, or install the llama-cpp-python that EdgeSpec asks for.",
            ) from error
    return bool(layouts)


@cache
def _first_layout(
    layouts: tuple[KernelLayout, ...], type_id: int, shape: tuple[int, ...]
) -> KernelLayout | None:
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
        for layout in layouts:
            buffer = f["ggml_backend_buft_alloc_buffer"](layout.address, 0)
            ggml.set_buffer(weight, buffer)
            supported = f["ggml_backend_dev_supports_op"](ggml.cpu_device(), product)
            ggml.set_buffer(weight, None)
            f["ggml_backend_buffer_free"](buffer)
            if supported:
                return layout
    return None
