"""Products with chosen matrices of a stack: where ggml finds the matrices, and which ones it takes.

ggml's MUL_MAT_ID takes a stack of matrices, rows, and for each row the numbers of the matrices to multiply it
by. It finds matrix number e at `data + e * nb[2]`, and nowhere requires that matrices lie side by side, nor
that there are as many as the model says. So a stack can be described as matrices that lie anywhere in a pool
of equal slots, and the numbers as numbers of slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import POINTER, Address, Tensor
from edgespec.kernels.ggml.tensors import is_in_host_memory, set_data

IntArray = NDArray[np.int32]

_INT_BYTES = 4
_INDICES = 2  # among the sources of a product
_FEWEST = 2  # matrices of a stack; some layouts' kernels look at the number of dimensions
_SOURCE_OFFSET, _NAME_OFFSET = Tensor.src.offset, Tensor.name.offset
_POINTER_BYTES = ctypes.sizeof(POINTER)


def place_stack(stack: Address, data: Address, stride: int, count: int) -> None:
    """Describe a stack as `count` matrices, of which the first is at `data` and each `stride` bytes apart."""
    tensor = Tensor.from_address(stack)
    tensor.ne[2] = max(count, _FEWEST)
    tensor.nb[2] = stride
    tensor.nb[3] = stride * tensor.ne[2]
    set_data(stack, data)


def stack_of(node: Address) -> Address:
    """The first source of a node: for a product, what its rows are multiplied by."""
    return _source(node, 0)


def indices_of(node: Address) -> Address:
    """The indices of a product with chosen matrices."""
    return _source(node, _INDICES)


def copied_name(tensor: Address) -> bytes:
    """The name of the tensor that this is the scheduler's copy of, on another device; empty if of none."""
    _, _, name = name_of(tensor).partition(b"#")
    return name.rpartition(b"#")[0]


def copies_among(tensors: Iterable[Address]) -> dict[Address, bytes]:
    """The scheduler's copies among the sources of a node, with the names of the tensors that they are of."""
    names = ((tensor, copied_name(tensor)) for tensor in tensors if tensor)
    return {copy: name for copy, name in names if name}


def write_copy(copy: Address, data: Address) -> None:
    """Write over a copy, wherever it is."""
    f = functions()
    f["ggml_backend_tensor_set"](copy, data, 0, f["ggml_nbytes"](copy))


def set_indices(node: Address, indices: Address) -> None:
    """Make a product choose by other indices."""
    POINTER.from_address(node + _SOURCE_OFFSET + _INDICES * _POINTER_BYTES).value = indices


def name_of(node: Address) -> bytes:
    return ctypes.string_at(node + _NAME_OFFSET)


def read_indices(tensor: Address) -> IntArray:
    """(rows, chosen) the indices that were computed, wherever they are: a copy, to read only.

    They may be the first columns of a wider matrix, such as the result of sorting.
    """
    layout = Tensor.from_address(tensor)
    chosen, rows, stride = int(layout.ne[0]), int(layout.ne[1]), int(layout.nb[1])
    if not rows or not chosen:
        return np.zeros((rows, chosen), np.int32)
    n_bytes = stride * (rows - 1) + _INT_BYTES * chosen
    if is_in_host_memory(tensor):
        copy = ctypes.string_at(layout.data, n_bytes)
    else:
        buffer = ctypes.create_string_buffer(n_bytes)
        functions()["ggml_backend_tensor_get"](tensor, ctypes.addressof(buffer), 0, n_bytes)
        copy = buffer.raw
    indices: IntArray = np.ndarray((rows, chosen), np.int32, copy, strides=(stride, _INT_BYTES))
    return indices


def _source(node: Address, number: int) -> Address:
    return POINTER.from_address(node + _SOURCE_OFFSET + number * _POINTER_BYTES).value or 0


class Indices:
    """Indices of our own, in the place of those that a graph computes."""

    def __init__(self) -> None:
        self._tensor: Any = Tensor()
        self._values: IntArray = np.zeros((0, 0), np.int32)

    @property
    def address(self) -> Address:
        """The tensor, for as long as this object lives."""
        return ctypes.addressof(self._tensor)

    def assign(self, like: Address, values: IntArray | Sequence[Sequence[int]]) -> None:
        """Hold these (rows, chosen) values from now on.

        Args:
            like: the tensor that the graph computed, of the same size.
        """
        new = np.asarray(values, np.int32)
        if new.shape == self._values.shape:
            self._values[:] = new
            return
        self._values = np.array(new)
        ctypes.memmove(self.address, like, ctypes.sizeof(Tensor))
        rows, chosen = new.shape
        row = _INT_BYTES * chosen
        tensor = self._tensor
        tensor.view_src, tensor.view_offs = None, 0
        tensor.data = self._values.ctypes.data
        tensor.nb = (_INT_BYTES, row, row * rows, row * rows)
