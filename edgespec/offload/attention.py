"""Flash attention whose rounding does not depend on how many rows a pass has.

ggml's CPU backend has two flash attention kernels. One computes a query row at a time; the other, used from a
certain number of rows on, works on tiles of rows and keys, and rounds differently. The choice depends on the
rows of one stream (the fourth dimension of the queries), not of the batch. So a node with many rows is
described as several streams of few rows each, over the same memory and with the same keys: the first kernel
computes it, and its consumers find the result where they expect it. A long chunk of a prompt can then be read
in one pass over the weights, with the same bits as in short chunks.
"""

from __future__ import annotations

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, TensorShape
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.graph import GraphObserver

MAX_ROWS = 60  # of a stream; ggml uses tiles from 64 on
_QUERIES, _MASK = 0, 3  # among a node's sources


class RowAttention(GraphObserver):
    """Describes attention nodes as streams of few rows, for the duration of one pass.

    Attributes:
        changed: how many nodes it has changed in total.
    """

    def __init__(self) -> None:
        self.changed = 0
        self.watch = Watch()
        self.watch.ask_about_operation(ggml.attention_operation(), MAX_ROWS + 1)
        self._before: dict[Address, TensorShape] = {}

    def reached(self, node: Address) -> bool:
        """Change a node that is about to be computed: attention over many rows."""
        self._divide(node)
        return False

    def end(self, *, completed: bool) -> None:
        """The pass is over: restore the nodes' shapes, as llama.cpp may reuse the graph."""
        while self._before:
            tensor, shape = self._before.popitem()
            ggml.set_shape(tensor, shape)

    def _divide(self, node: Address) -> None:
        sources = ggml.read_node(node)
        queries, mask = sources[_QUERIES], sources[_MASK]
        # The queries' second dimension is that of their rows, the result's is that of the heads.
        parts = [(queries, 1), (node, 2), *([(mask, 1)] if mask else [])]
        rows = ggml.shape_of(queries).sizes[1]
        per_stream = _most_that_divides(rows)
        shapes = {tensor: self._before.get(tensor) or ggml.shape_of(tensor) for tensor, _ in parts}
        if any(shapes[t].sizes[3] != 1 or shapes[t].sizes[dimension] != rows for t, dimension in parts):
            return  # already in streams, or in an unknown layout
        for tensor, dimension in parts:
            if tensor not in self._before:  # layers share the mask
                self._before[tensor] = shapes[tensor]
                ggml.set_shape(tensor, shapes[tensor].in_streams(dimension, per_stream))
        self.changed += 1


def _most_that_divides(rows: int) -> int:
    return max(size for size in range(1, MAX_ROWS + 1) if rows % size == 0)


def keep_row_attention(context: Context) -> bool:
    """Make attention's rounding independent of the rows of a pass, if the context's graph has a callback.

    Returns:
        Whether it is independent now.
    """
    if not context.graph.installed:
        return False
    try:
        context.graph.add(RowAttention())
    except ggml.UnsupportedBuild:
        return False
    return True
