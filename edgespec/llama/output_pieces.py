"""The end of a pass in pieces: logits of more rows than there is memory for at once.

llama.cpp computes the end of the last layer, and the logits, for all rows that want them in one go, into
buffers of rows x vocabulary. A pass over streamed weights may read thousands of tokens, and their logits
would take gigabytes. So llama.cpp is asked for a few of them. When it has computed these, the nodes of the
graph's end are computed again for the next few rows, by the same kernels and with the same number of rows,
from copies of what the graph chose its rows from.

That works for graphs whose end depends on nothing but rows that were chosen for it, and on weights. The first
piece is computed twice, and must give llama.cpp's own logits, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.products import Processor
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.abort import DecodeAborted
from edgespec.llama.runtime.batch import IntArray
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.graph import GraphObserver

_LOGITS = b"result_output"
_MAX_NODES = 512
_ALIGNMENT = 64
_VIEW, _OFFSET, _DATA = 10, 11, 12  # after the ten sources


class UnknownEnd(Exception):
    """The graph's end depends on more than rows that were chosen for it."""


class OutputPieces(GraphObserver):
    """Computes the logits of a decode in pieces; an observer while that decode runs.

    Args:
        n_rows: of the batch, with padding.
        wanted: the rows whose logits are wanted, ascending; the batch asks for the first `n_outputs` of them.
        receive: called with the number of the first row in `wanted` and (rows, n_vocab) logits, a view.
    """

    def __init__(
        self,
        context: Context,
        *,
        n_rows: int,
        n_outputs: int,
        wanted: IntArray,
        receive: Callable[[int, FloatArray], None],
    ) -> None:
        self._context = context
        self._n_rows, self._n_outputs = n_rows, n_outputs
        self._wanted = wanted
        self._receive = receive
        self._chosen: dict[Address, FloatArray] = {}  # nodes that choose rows, and what from
        self._stop: Callable[[], bool] = lambda: False
        self.watch = Watch()
        self.watch.ask_about_operation(ggml.rows_operation(), n_rows)
        self.watch.stop_after(_LOGITS)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A block in which the context decodes the batch."""
        self._context.graph.add(self)
        try:
            with self._context.model.weights.keeping_last():
                yield
        finally:
            self._context.graph.remove(self)

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        self._chosen, self._stop = {}, stop

    def reached(self, node: Address) -> bool:
        """Stop after nodes that choose the rows whose logits are wanted."""
        source, indices = ggml.read_node(node)[:2]
        return (
            ggml.operation_of(source) != 0
            and ggml.shape_of(source).sizes[1] == self._n_rows
            and ggml.shape_of(indices).sizes[0] == self._n_outputs
        )

    def computed(self, node: Address) -> None:
        """Keep what rows were chosen from; or compute the end for all of them."""
        if ggml.name_of(node) != _LOGITS:
            values = ggml.read_rows(ggml.read_node(node)[0])
            if values is None:
                raise UnknownEnd("rows of an unknown layout")
            self._chosen[node] = values
            return
        end = _End(node, self._chosen, self._context.n_threads)
        try:
            self._compute(end)
        finally:
            end.close()

    def _compute(self, end: _End) -> None:
        n_outputs = self._n_outputs
        for start in range(0, len(self._wanted), n_outputs):
            if self._stop():
                raise DecodeAborted
            first = min(start, len(self._wanted) - n_outputs)  # the last piece is as long as all others
            expected = end.logits.copy() if start == 0 else None
            end.compute(self._wanted[first : first + n_outputs])
            if expected is not None and not np.array_equal(end.logits, expected):
                raise UnknownEnd("other logits")
            self._receive(start, end.logits[start - first :])


class _End:
    """The nodes from the choice of rows to the logits, with memory of their own.

    ggml reuses the memory of nodes that are no longer needed, so each node gets its own while they are
    computed again.
    """

    def __init__(self, logits: Address, chosen: dict[Address, FloatArray], n_threads: int) -> None:
        self._f = ggml.functions()
        self._node = logits
        self._chosen = chosen
        self._places = {node: ggml.read_node(node)[_DATA] for node in self._nodes()}
        self._memory: list[NDArray[np.uint8]] = []
        n_vocab, n_rows = ggml.shape_of(logits).sizes[:2]
        memory = (ctypes.c_float * (n_rows * n_vocab)).from_address(self._places[logits])
        self.logits: FloatArray = np.frombuffer(memoryview(memory), dtype=np.float32).reshape(n_rows, n_vocab)
        self._processor = Processor(n_threads)
        self._scratch = ggml.ScratchContext(n_tensors=1, n_nodes=_MAX_NODES)
        with ggml.without_sources(list(chosen)):
            self._graph = self._f["ggml_new_graph_custom"](self._scratch.handle, _MAX_NODES, False)
            self._f["ggml_build_forward_expand"](self._graph, logits)
        for node in self._places:
            self._place(node)

    def _nodes(self) -> list[Address]:
        """All nodes that are computed again, sources first."""
        found: list[Address] = []
        seen: set[Address] = set()

        def visit(node: Address) -> None:
            if not node or node in seen or (ggml.operation_of(node) == 0 and not _views(node)):
                return
            seen.add(node)
            if len(seen) > _MAX_NODES // 2:
                raise UnknownEnd("it reads more than chosen rows")
            if not ggml.is_in_host_memory(node):
                raise UnknownEnd("a device computes it")
            if node not in self._chosen:
                for source in (*ggml.read_node(node)[:_VIEW], _views(node)):
                    visit(source)
            found.append(node)

        visit(self._node)
        if not self._chosen or not set(self._chosen) <= seen:
            raise UnknownEnd("it reads no chosen rows")
        return found

    def _place(self, node: Address) -> None:
        """Give a node memory of its own; views follow what they are views of."""
        fields = ggml.read_node(node)
        if fields[_VIEW]:
            place = ggml.read_node(fields[_VIEW])[_DATA] + fields[_OFFSET]
        elif node == self._node:
            return
        else:
            self._memory.append(np.empty(self._f["ggml_nbytes"](node) + _ALIGNMENT, dtype=np.uint8))
            address = self._memory[-1].ctypes.data
            place = address + -address % _ALIGNMENT
        ggml.set_data(node, place)

    def compute(self, rows: IntArray) -> None:
        """Compute the logits of these rows."""
        for node, values in self._chosen.items():
            chosen = np.ascontiguousarray(values[rows])
            ctypes.memmove(ggml.read_node(node)[_DATA], chosen.ctypes.data, chosen.nbytes)
        if self._f["ggml_backend_graph_compute"](self._processor.handle, self._graph):
            raise UnknownEnd("it cannot be computed again")

    def close(self) -> None:
        """Give all nodes their places back."""
        for node, place in self._places.items():
            ggml.set_data(node, place)
        self._scratch.__exit__()
        self._processor.__exit__()


def _views(node: Address) -> Address:
    viewed: Address = ggml.read_node(node)[_VIEW] or 0
    return viewed


def supports(context: Context) -> bool:
    """True if a context's passes may end in pieces, as far as is known before one is tried."""
    weights = context.model.weights
    return context.graph.installed and weights.streamed_bytes > 0 and weights.expert_use is None


def row_bytes(context: Context) -> int:
    """Bytes that are usually copied of each row: of the last layer's attention and of its input."""
    return 2 * context.model.width * 4
