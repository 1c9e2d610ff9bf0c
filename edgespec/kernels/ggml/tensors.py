"""Reading and changing ggml's tensors and graph nodes in place."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import (
    F32,
    POINTER,
    SOURCES,
    Address,
    ContextParams,
    Tensor,
    TypeTraits,
)

# The fields of a tensor that say what a graph node reads: sources, view, data, name.
_NODE = struct.Struct(f"={SOURCES}QQQQ64s")
_NODE_OFFSET = Tensor.src.offset
_DATA_OFFSET = Tensor.data.offset
_SHAPE = struct.Struct("=4q4Q")
_SHAPE_OFFSET = Tensor.ne.offset
_OPERATION_OFFSET = Tensor.op.offset
_FLOAT_BYTES = 4


class ScratchContext:
    """A ggml context for a few tensors without data, and optionally a graph of `n_nodes`."""

    def __init__(self, n_tensors: int = 8, n_nodes: int = 0) -> None:
        self._f = functions()
        size = self._f["ggml_tensor_overhead"]() * n_tensors
        if n_nodes:
            size += self._f["ggml_graph_overhead_custom"](n_nodes, False)
        self.handle: Address | None = self._f["ggml_init"](ContextParams(size, None, True))

    def tensor(self, type_id: int, shape: tuple[int, ...], name: bytes = b"") -> Address:
        """A new tensor; `shape` begins with the row length."""
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        tensor: Address = self._f["ggml_new_tensor"](self.handle, type_id, len(shape), sizes)
        self._f["ggml_set_name"](tensor, name)
        return tensor

    def __enter__(self) -> ScratchContext:
        return self

    def __exit__(self, *_: object) -> None:
        self._f["ggml_free"](self.handle)


def read_node(node: Address) -> tuple[Any, ...]:
    """A graph node's ten sources, the tensor it is a view of, the view's offset, its data and its name."""
    return _NODE.unpack(ctypes.string_at(node + _NODE_OFFSET, _NODE.size))


def sources_of(node: Address) -> tuple[Address, ...]:
    """A graph node's ten sources; 0 for those that it does not have."""
    return read_node(node)[:SOURCES]


def set_data(tensor: Address, data: Address) -> None:
    """Point a tensor to weights at `data`."""
    POINTER.from_address(tensor + _DATA_OFFSET).value = data


@dataclass(frozen=True)
class TensorShape:
    """A tensor's four dimensions."""

    sizes: tuple[int, ...]  # elements along each, rows first
    strides: tuple[int, ...]  # bytes from one element to the next along each

    def in_streams(self, dimension: int, size: int) -> TensorShape:
        """Divide a dimension into streams of `size`, along the fourth; the elements stay in place."""
        sizes, strides = list(self.sizes), list(self.strides)
        sizes[dimension], sizes[3] = size, self.sizes[dimension] // size
        strides[3] = self.strides[dimension] * size
        return TensorShape(tuple(sizes), tuple(strides))


def shape_of(tensor: Address) -> TensorShape:
    """A tensor's dimensions."""
    fields = _SHAPE.unpack(ctypes.string_at(tensor + _SHAPE_OFFSET, _SHAPE.size))
    return TensorShape(fields[:4], fields[4:])


def set_shape(tensor: Address, shape: TensorShape) -> None:
    """Change how a tensor's memory is described."""
    ctypes.memmove(tensor + _SHAPE_OFFSET, _SHAPE.pack(*shape.sizes, *shape.strides), _SHAPE.size)


def dequantized(type_id: int, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers in rows (rows, bytes) of a type, by the function with which ggml looks up rows."""
    if type_id == F32:
        return data.view(np.float32)
    traits = TypeTraits.from_address(functions()["ggml_get_type_traits"](type_id))
    n_rows, row_bytes = data.shape
    found = np.empty((n_rows, row_bytes // traits.type_size * traits.blck_size), dtype=np.float32)
    convert = ctypes.CFUNCTYPE(None, POINTER, POINTER, ctypes.c_int64)(traits.to_float)
    convert(data.ctypes.data, found.ctypes.data, found.size)
    return found


def read_rows(node: Address) -> NDArray[np.float32] | None:
    """(rows, width) the values that were computed, wherever they are; None if they are no such matrix."""
    sizes, strides = (shape := shape_of(node)).sizes, shape.strides
    dense = strides[0] == _FLOAT_BYTES and strides[1] == sizes[0] * _FLOAT_BYTES
    if ctypes.c_int.from_address(node + Tensor.type.offset).value != F32 or sizes[2] * sizes[3] != 1:
        return None
    if not dense:
        return None
    values = np.empty((sizes[1], sizes[0]), dtype=np.float32)
    functions()["ggml_backend_tensor_get"](node, values.ctypes.data, 0, values.nbytes)
    return values


def is_in_host_memory(tensor: Address) -> bool:
    """True if the processor can read a tensor's data at its address."""
    buffer = POINTER.from_address(tensor + Tensor.buffer.offset).value
    return bool(buffer and functions()["ggml_backend_buffer_is_host"](buffer))


@contextmanager
def without_sources(nodes: Sequence[Address]) -> Iterator[None]:
    """A block in which nodes look like tensors that nothing computes."""
    start = _OPERATION_OFFSET
    length = _NODE_OFFSET + SOURCES * ctypes.sizeof(POINTER) - start
    kept = [ctypes.string_at(node + start, length) for node in nodes]
    try:
        for node in nodes:
            ctypes.memset(node + _OPERATION_OFFSET, 0, ctypes.sizeof(ctypes.c_int))
            ctypes.memset(node + _NODE_OFFSET, 0, SOURCES * ctypes.sizeof(POINTER))
        yield
    finally:
        for node, fields in zip(nodes, kept, strict=True):
            ctypes.memmove(node + start, fields, length)


def operation_of(node: Address) -> int:
    """The number of a graph node's operation."""
    return ctypes.c_int.from_address(node + _OPERATION_OFFSET).value


def set_buffer(tensor: Address, buffer: Address | None) -> None:
    """Assign a tensor to a buffer without placing its data there."""
    POINTER.from_address(tensor + Tensor.buffer.offset).value = buffer
