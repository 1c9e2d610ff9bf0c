"""Products of a quantized matrix with rows of activations, computed by ggml in a given layout.

To be used only in a process of its own (llama.trials.kernel_worker), as a kernel may crash.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

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


class Product:
    """The product of a matrix in one layout with rows of activations.

    Args:
        shape: of the matrix, row length first; with a third number it is a stack of matrices, and each row of
            activations is multiplied by one of them.
        data: the matrix as in a file.
        layout: None for the plain one.
        activations: (rows, row length).
    """

    def __init__(
        self,
        processor: Processor,
        type_id: int,
        shape: tuple[int, ...],
        data: bytes,
        layout: KernelLayout | None,
        activations: FloatArray,
    ) -> None:
        self._f = ggml.functions()
        self._processor = processor
        self._stack = ExitStack()
        self._shape = (len(activations), shape[1])
        plain: Address = self._f["ggml_backend_cpu_buffer_type"]()
        with ExitStack() as stack:
            scratch = stack.enter_context(ggml.ScratchContext(n_tensors=8, n_nodes=_NODES))
            weight = scratch.tensor(type_id, shape)
            self._place(stack, weight, layout.address if layout else plain)
            self._f["ggml_backend_tensor_set"](weight, data, 0, len(data))
            rows = np.ascontiguousarray(activations, dtype=np.float32)
            if len(shape) == 2:
                input_rows = scratch.tensor(ggml.F32, (shape[0], len(rows)))
                self._result: Address = self._f["ggml_mul_mat"](scratch.handle, weight, input_rows)
            else:
                input_rows = scratch.tensor(ggml.F32, (shape[0], 1, len(rows)))
                chosen = scratch.tensor(ggml.I32, (1, len(rows)))
                self._place(stack, chosen, plain)
                indices = np.arange(len(rows), dtype=np.int32) % shape[2]
                self._f["ggml_backend_tensor_set"](chosen, indices.ctypes.data, 0, indices.nbytes)
                self._result = self._f["ggml_mul_mat_id"](scratch.handle, weight, input_rows, chosen)
            self._place(stack, input_rows, plain)
            self._f["ggml_backend_tensor_set"](input_rows, rows.ctypes.data, 0, rows.nbytes)
            self._place(stack, self._result, plain)
            self._graph = self._f["ggml_new_graph_custom"](scratch.handle, _NODES, False)
            self._f["ggml_build_forward_expand"](self._graph, self._result)
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
        """(rows, matrix rows) of the last `compute`."""
        values = np.empty(self._shape, dtype=np.float32)
        self._f["ggml_backend_tensor_get"](self._result, values.ctypes.data, 0, values.nbytes)
        return values

    def __enter__(self) -> Product:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _place(self, stack: ExitStack, tensor: Address, buffer_type: Address) -> None:
        size = self._f["ggml_backend_buft_get_alloc_size"](buffer_type, tensor)
        buffer = self._f["ggml_backend_buft_alloc_buffer"](buffer_type, size + _PAGE)
        if not buffer:
            raise MemoryError(f"cannot allocate {size} bytes for a product")
        stack.callback(self._f["ggml_backend_buffer_free"], buffer)
        base = self._f["ggml_backend_buffer_get_base"](buffer)
        self._f["ggml_backend_tensor_alloc"](buffer, tensor, base)
