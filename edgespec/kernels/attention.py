"""Attention over random keys and values, computed by ggml or by EdgeSpec's own kernels.

To be computed only in a process of its own (kernels.trial_worker), as a kernel may crash.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels import ggml
from edgespec.kernels.native.library import NativeLibrary
from edgespec.kernels.products import FloatArray, Processor, placed, quantized
from edgespec.kernels.setting import instruction_set

_NODES = 8
_TRIES = 3


@dataclass(frozen=True)
class Attention:
    """Queries over cells of a cache: each row sees one cell more than the one before, the last one all."""

    size: int  # of a head
    # heads of queries, and of keys and values
    heads: int
    shared: int
    cells: int
    cap: float = 0.0  # soft cap of the scores; 0 for none
    kept_as: int = ggml.F16  # type of the cached keys and values

    def compute(self, processor: Processor, rows: int, own: NativeLibrary | None) -> FloatArray:
        """(rows, heads * size) the result for the first `rows` of as many rows as there are cells.

        Args:
            own: what computes it; None for ggml.
        """
        return self._computed(processor, rows, own)[0]

    def seconds(self, processor: Processor, own: NativeLibrary | None) -> float:
        """Seconds in which a row attends to a cell, for each element of all heads of queries."""
        pairs = self.cells * (self.cells + 1) / 2
        taken = min(self._computed(processor, self.cells, own)[1] for _ in range(_TRIES))
        return taken / (pairs * self.heads * self.size)

    def _computed(
        self, processor: Processor, rows: int, own: NativeLibrary | None
    ) -> tuple[FloatArray, float]:
        """The result, and the seconds that it took."""
        rng = np.random.default_rng(0)
        queries = rng.standard_normal((self.heads, self.cells, self.size), dtype=np.float32)[:, :rows]
        kept = (self.shared, self.cells, self.size)
        keys, values = (self._cached(rng.standard_normal(kept, dtype=np.float32)) for _ in range(2))
        mask = np.triu(np.full((self.cells, self.cells), -np.inf, np.float16), 1)[:rows]
        f = ggml.functions()
        with ExitStack() as stack:
            scratch = stack.enter_context(ggml.ScratchContext(n_tensors=8, n_nodes=_NODES))
            sources = [
                placed(stack, scratch.tensor(type_id, shape[::-1]), array)
                for type_id, shape, array in (
                    (ggml.F32, queries.shape, queries),
                    (self.kept_as, kept, keys),
                    (self.kept_as, kept, values),
                    (ggml.F16, mask.shape, mask),
                )
            ]
            node = f["ggml_flash_attn_ext"](scratch.handle, *sources, self.size**-0.5, 0.0, self.cap)
            placed(stack, node)
            graph = f["ggml_new_graph_custom"](scratch.handle, _NODES, False)
            f["ggml_build_forward_expand"](graph, node)
            if own is not None:
                stack.enter_context(own.new_planner(instruction_set()))
            begun = time.perf_counter()
            f["ggml_backend_graph_compute"](processor.handle, graph)
            taken = time.perf_counter() - begun
            result = np.empty((rows, self.heads * self.size), np.float32)
            f["ggml_backend_tensor_get"](node, result.ctypes.data, 0, result.nbytes)
            return result, taken

    def _cached(self, values: FloatArray) -> NDArray[Any]:
        """Keys or values as a cache keeps them."""
        if self.kept_as == ggml.F16:
            return values.astype(np.float16)
        data = quantized(self.kept_as, values.reshape(-1, self.size))
        assert data is not None, "no cache has a type that needs an importance matrix"
        return np.frombuffer(data, np.uint8)
