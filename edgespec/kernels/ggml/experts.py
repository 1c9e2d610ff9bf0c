"""Products with chosen matrices of a stack: where ggml finds the matrices, and which ones it takes.

ggml's MUL_MAT_ID takes a stack of matrices, rows, and for each row the numbers of the matrices to multiply it
by. It finds matrix number e at `data + e * nb[2]`, and nowhere requires that matrices lie side by side, nor
that there are as many as the model says. So a stack can be described as matrices that lie anywhere in a pool
of equal slots, and the numbers as numbers of slots.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import F32, I32, POINTER, Address, Tensor, require_same
from edgespec.kernels.ggml.tensors import ScratchContext, operation_of, read_node, set_data, shape_of

IntArray = NDArray[np.int32]

_INT_BYTES = 4
_INDICES = 2  # among the sources of a product
_FEWEST = 2  # matrices of a stack; some layouts' kernels look at the number of dimensions
_SOURCE_OFFSET, _NAME_OFFSET = Tensor.src.offset, Tensor.name.offset
_POINTER_BYTES = ctypes.sizeof(POINTER)


@cache
def indexed_product() -> int:
    """ggml's operation number of a product with matrices that are chosen by index.

    Raises:
        UnsupportedBuild: its sources are not where they are expected.
    """
    with ScratchContext() as scratch:
        stack = scratch.tensor(F32, (32, 8, 4))
        rows, indices = scratch.tensor(F32, (32, 1, 3)), scratch.tensor(I32, (2, 3))
        node = functions()["ggml_mul_mat_id"](scratch.handle, stack, rows, indices)
        require_same("the sources of an indexed product", read_node(node)[:3], (stack, rows, indices))
        require_same("the shape of an indexed product", shape_of(node).sizes, (8, 2, 3, 1))
        return operation_of(node)


def place_stack(stack: Address, data: Address, stride: int, count: int) -> None:
    """Describe a stack as `count` matrices, of which the first is at `data` and each `stride` bytes apart."""
    tensor = Tensor.from_address(stack)
    tensor.ne[2] = max(count, _FEWEST)
    tensor.nb[2] = stride
    tensor.nb[3] = stride * tensor.ne[2]
    set_data(stack, data)


def stack_of(node: Address) -> Address:
    """The first source of a node: for a product, what its rows are multiplied by."""
    return POINTER.from_address(node + _SOURCE_OFFSET).value or 0


def indices_of(node: Address) -> Address:
    """The indices of a product with chosen matrices."""
    return POINTER.from_address(node + _SOURCE_OFFSET + _INDICES * _POINTER_BYTES).value or 0


def set_indices(node: Address, indices: Address) -> None:
    """Make a product choose by other indices."""
    POINTER.from_address(node + _SOURCE_OFFSET + _INDICES * _POINTER_BYTES).value = indices


def name_of(node: Address) -> bytes:
    """A node's name."""
    return ctypes.string_at(node + _NAME_OFFSET)


def read_indices(tensor: Address) -> IntArray:
    """(rows, chosen) the indices that were computed: a copy.

    They may be the first columns of a wider matrix, such as the result of sorting.
    """
    layout = Tensor.from_address(tensor)
    chosen, rows = int(layout.ne[0]), int(layout.ne[1])
    if not rows or not chosen:
        return np.zeros((rows, chosen), np.int32)
    n_bytes = layout.nb[1] * (rows - 1) + _INT_BYTES * chosen
    flat = np.frombuffer((ctypes.c_char * n_bytes).from_address(layout.data), np.int32)
    strided = np.lib.stride_tricks.as_strided(flat, (rows, chosen), (layout.nb[1], _INT_BYTES))
    return np.array(strided, np.int32)


class Indices:
    """Indices of our own, in the place of those that a graph computes."""

    def __init__(self) -> None:
        self._tensor: Any = Tensor()
        self._values: IntArray = np.zeros((0, 0), np.int32)

    @property
    def address(self) -> Address:
        """The tensor, for as long as this object lives."""
        return ctypes.addressof(self._tensor)

    def assign(self, like: Address, values: IntArray) -> None:
        """Hold these (rows, chosen) values from now on.

        Args:
            like: the tensor that the graph computed, of the same size.
        """
        self._values = np.ascontiguousarray(values, np.int32)
        ctypes.memmove(self.address, like, ctypes.sizeof(Tensor))
        tensor = self._tensor
        tensor.view_src, tensor.view_offs = None, 0
        tensor.data = self._values.ctypes.data
        tensor.nb[1] = _INT_BYTES * tensor.ne[0]
        tensor.nb[2] = tensor.nb[3] = tensor.nb[1] * tensor.ne[1]
