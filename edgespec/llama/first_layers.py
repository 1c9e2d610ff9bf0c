"""Passes over the first layers of a model, which cost a fraction of whole passes.

Layers of the same kind compute in the same way. So a few of them show by which kernels a streamed model is
computed, and how long these take, without reading it all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.layouts import kernel_layout, weight_layout
from edgespec.kernels.setting import OWN
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.models.gguf.layers import ModelFiles, layers_of_each_kind
from edgespec.models.gguf.types import TensorInfo

_OUTPUT = b"l_out-%d"
_HEADS = ("output.weight", "token_embd.weight")  # which may be tied


class FirstLayers:
    """Decodes through as many layers as it takes to compute one of each kind.

    Args:
        context: observed, as those of streamed models are.
        files: of its model.

    Attributes:
        seconds: of a whole pass without waiting for the disk, by rows, as far as these layers tell: the
            shortest of the decodes so far.
    """

    def __init__(self, context: Context, files: ModelFiles) -> None:
        layers = files.layers()
        count = layers_of_each_kind(layers)
        self._context = context
        self._matrices = [tensor for layer in layers for tensor in layer.tensors]
        self._head = _head(files)
        of_these = sum(layer.n_bytes for layer in layers[:count])
        head_bytes = self._head.n_bytes if self._head is not None else 0
        self._share = of_these / max(sum(t.n_bytes for t in self._matrices) + head_bytes, 1)
        self.seconds: dict[int, float] = {}
        self._end = _End(_OUTPUT % layers[count - 1].index) if layers else None

    @property
    def max_rows(self) -> int:
        """The maximum number of rows in a decode."""
        return self._context.n_rows

    @property
    def all_own(self) -> bool:
        """True if EdgeSpec's own layout holds every matrix of the model."""
        layouts = [weight_layout(t.name, t.type_id, t.shape) for t in self._matrices]
        layouts.append(None if self._head is None else kernel_layout(self._head.type_id, self._head.shape))
        return all(layout is not None and layout.name == OWN for layout in layouts)

    def watch_own(self) -> Callable[[], bool]:
        return self._context.watch_own()

    def decode(self, rows: int) -> FloatArray | None:
        """(rows, width) hidden states after these layers; None if the graph does not name them.

        The context must be empty, and is left empty.

        Raises:
            DecodeAborted, BackendError, StreamError, ModelFileError: as Context.decode.
        """
        if self._end is None or not self._context.graph.installed or rows > self._context.n_rows:
            return None
        tokens = np.arange(rows, dtype=np.int32) % self._context.model.vocabulary.n_tokens
        batch = TokenBatch.run(tokens, 0, n_sequences=1, logits="last")
        waited, begun = self._context.waited_s, time.perf_counter()
        end = self._end
        self._context.graph.add(end)
        try:
            with suppress(_Reached):
                self._context.decode(batch)
            taken = time.perf_counter() - begun - (self._context.waited_s - waited)
        finally:
            self._context.graph.remove(end)
            self._context.clear()
        if end.values is None or len(end.values) != rows:
            return None
        self.seconds[rows] = min(self.seconds.get(rows, math.inf), max(taken, 0.0) / self._share)
        return end.values


class _Reached(BaseException):
    """The last of the layers has been computed."""


class _End(GraphObserver):
    """Observes a graph, and ends it after one node."""

    def __init__(self, name: bytes) -> None:
        self.watch = Watch()
        self.watch.stop_after(name)
        self.values: FloatArray | None = None

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        self.values = None

    def computed(self, node: Address) -> None:
        """The last node has been computed."""
        self.values = ggml.read_rows(node)
        raise _Reached


def _head(files: ModelFiles) -> TensorInfo | None:
    """The matrix that gives the logits."""
    by_name = {tensor.name: tensor for header in files.headers for tensor in header.tensors}
    return next((by_name[name] for name in _HEADS if name in by_name), None)
