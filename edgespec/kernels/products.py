"""Computations with a quantized matrix in a given layout, by ggml.

To be used only in a process of its own (kernels.trial_worker), as a kernel may crash.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.layouts import KernelLayout

FloatArray = NDArray[np.float32]

_PAGE = 4096
_NODES = 16


class Processor:
    """ggml's CPU backend with a number of threads."""

    def __init__(self, n_threads: int) -> None:
        self._f = ggml.functions()
        self.handle: Address = self._f["ggml_backend_dev_init"](ggml.cpu_device(), None)
        self._f["ggml_backend_cpu_set_n_threads"](self.handle, n_threads)

    def __enter__(self) -> Processor:
        return self

    def __exit__(self, *_: object) -> None:
        self._f["ggml_backend_free"](self.handle)


def type_name(type_id: int) -> str:
    """ggml's name of a quantization, in capitals as is usual."""
    return str(ggml.functions()["ggml_type_name"](type_id).decode()).upper()


def quantized(type_id: int, weights: FloatArray) -> bytes | None:
    """(rows, row length) weights, quantized as in a file; None if that needs an importance matrix."""
    f = ggml.functions()
    if f["ggml_quantize_requires_imatrix"](type_id):
        return None
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    target = np.zeros(weights.nbytes, dtype=np.uint8)
    size = f["ggml_quantize_chunk"](
        type_id, weights.ctypes.data, target.ctypes.data, 0, weights.shape[0], weights.shape[1], None
    )
    return target[:size].tobytes()


def placed(
    stack: ExitStack,
    tensor: Address,
    values: bytes | NDArray[Any] | None = None,
    layout: KernelLayout | None = None,
) -> Address:
    """Give a tensor memory until the stack is closed, and values.

    Args:
        layout: of the memory; None for the plain one.

    Raises:
        MemoryError: there is none.
    """
    f = ggml.functions()
    kind = layout.address if layout else f["ggml_backend_cpu_buffer_type"]()
    size = f["ggml_backend_buft_get_alloc_size"](kind, tensor) + _PAGE
    buffer = f["ggml_backend_buft_alloc_buffer"](kind, size)
    if not buffer:
        raise MemoryError(f"cannot allocate {size} bytes to try a kernel")
    stack.callback(f["ggml_backend_buffer_free"], buffer)
    f["ggml_backend_tensor_alloc"](buffer, tensor, f["ggml_backend_buffer_get_base"](buffer))
    if values is not None:
        data = values if isinstance(values, bytes) else values.tobytes()
        f["ggml_backend_tensor_set"](tensor, data, 0, len(data))
    return tensor


class Product:
    """The product of a matrix in one layout with rows of activations.

    Args:
        shape: of the matrix, row length first; with a third number it is a stack of matrices, and each row of
            activations is multiplied by one of them.
        data: the matrix as in a file.
        layout: None for the plain one.
        activations: (rows, row length), or (sequences, rows, row length), as in models with a running state;
            integers are numbers of the matrix's rows, which are looked up.
    """

    def __init__(
        self,
        processor: Processor,
        type_id: int,
        shape: tuple[int, ...],
        data: bytes,
        layout: KernelLayout | None,
        activations: NDArray[Any],
    ) -> None:
        self._f = f = ggml.functions()
        self._processor = processor
        with ExitStack() as stack:
            scratch = stack.enter_context(ggml.ScratchContext(n_tensors=8, n_nodes=_NODES))
            weight = placed(stack, scratch.tensor(type_id, shape), data, layout)
            given = activations.shape if len(shape) == 2 else (len(activations), 1, shape[0])
            lookup = activations.dtype == np.int32
            inputs = scratch.tensor(ggml.I32 if lookup else ggml.F32, given[::-1])
            if lookup:
                node = f["ggml_get_rows"](scratch.handle, weight, inputs)
            elif len(shape) == 2:
                node = f["ggml_mul_mat"](scratch.handle, weight, inputs)
            else:
                chosen = np.arange(len(activations), dtype=np.int32)[:, None] % shape[2]
                indices = placed(stack, scratch.tensor(ggml.I32, chosen.shape[::-1]), chosen)
                node = f["ggml_mul_mat_id"](scratch.handle, weight, inputs, indices)
            self._shape = (activations.size, shape[0]) if lookup else (*activations.shape[:-1], shape[1])
            placed(stack, inputs, activations if lookup else np.asarray(activations, np.float32))
            self._result = placed(stack, node)
            self._graph = f["ggml_new_graph_custom"](scratch.handle, _NODES, False)
            f["ggml_build_forward_expand"](self._graph, node)
            self._stack = stack.pop_all()

    def compute(self) -> float:
        """Compute the product and return the seconds that it took.

        Raises:
            RuntimeError: ggml refused.
        """
        start = time.perf_counter()
        status = self._f["ggml_backend_graph_compute"](self._processor.handle, self._graph)
        seconds = time.perf_counter() - start
        if status != 0:
            raise RuntimeError(f"ggml could not compute a product (status {status})")
        return seconds

    def result(self) -> FloatArray:
        """([sequences,] rows, matrix rows) of the last `compute`; of a lookup, (rows, row length)."""
        values = np.empty(self._shape, dtype=np.float32)
        self._f["ggml_backend_tensor_get"](self._result, values.ctypes.data, 0, values.nbytes)
        return values

    def __enter__(self) -> Product:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
