"""Reading a model's hidden states while it computes, for draft heads.

A draft head reads what the target computes on the way: the inputs of a few of its layers. llama.cpp's
architectures name a layer's output `l_out-<layer>`, so they are copied when the graph has reached these
nodes. The graph is stopped there and continued; its results stay the same bit for bit.

llama.cpp can copy layers' inputs itself, but only for some architectures: with others it aborts the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.base.option import named
from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.graph import GraphObserver


class LastStates:
    """Shows the last states of every decode of a context: a source of hidden states, like LayerTap.

    Args:
        width: elements of a state.
    """

    observers: Sequence[GraphObserver] = ()  # of the graph that it needs: none

    def __init__(self, width: int) -> None:
        self._width = width
        self._context: Context | None = None

    def attach(self, context: Context) -> None:
        """Have a context keep its states from now on.

        Raises:
            UnsupportedBuild: this llama.cpp build cannot.
        """
        nextn.keep_states(context)
        self._context = context

    def rows(self) -> FloatArray:
        """(rows, width) of the last decode, in the order of its batch, rows of padding included.

        They are a view, valid until the next decode.

        Raises:
            BackendError: there are none.
        """
        assert self._context is not None, "no context is attached"
        return nextn.kept_rows(self._context, self._context.n_decoded, self._width, "last states")

    def require_rows(self, context: Context) -> None:
        """Make sure that a context shows its states, by a decode of two tokens; empties its cache.

        Raises:
            BackendError: it does not.
        """
        try:
            context.decode(TokenBatch.run([0, 0], 0, n_sequences=1, logits="last"))
            shown = np.isfinite(self.rows()).all() and self.rows().any(axis=1).all()
        finally:
            context.clear()
        if not shown:
            raise BackendError("This model does not expose the last states that its drafter reads.")


_OUTPUT = b"l_out-%d"


class LayerTap:
    """Copies the inputs of some layers in every decode of a context; an observer of its graph.

    Args:
        layers: from 1 to the number of layers less 1. The last layer's output is computed for some rows only.
        width: elements of a hidden state.

    Raises:
        UnsupportedBuild: the graph of this llama.cpp build cannot be read.
    """

    def __init__(self, layers: Sequence[int], width: int) -> None:
        ggml.check()
        self._width = width
        self._layers = tuple(layers)
        self._names = {_OUTPUT % (layer - 1): layer for layer in layers}
        self._found: dict[int, list[FloatArray]] = {}
        self.watch = Watch()
        for name in self._names:
            self.watch.stop_after(name)

    @property
    def observers(self) -> Sequence[GraphObserver]:
        """The observers that the context must have."""
        return (self,)

    def attach(self, context: Context) -> None:
        """Nothing to do: the context calls its observers."""

    @property
    def row_bytes(self) -> int:
        """Bytes of what is copied of one row."""
        return len(self._layers) * self._width * 4

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A decode begins: forget what was copied in the last one."""
        self._found = {layer: [] for layer in self._layers}

    def reached(self, node: Address) -> bool:
        """Ask for nothing: the graph stops where states are to be copied."""
        return False

    def computed(self, node: Address) -> None:
        """A layer's output is computed: copy it."""
        layer = self._names[ggml.name_of(node)]
        values = ggml.read_rows(node)
        if values is None or values.shape[1] != self._width:
            raise BackendError(f"The hidden states of layer {layer} have an unknown layout.")
        self._found[layer].append(values)

    def end(self, *, completed: bool) -> None:
        if not completed:
            self._found = {}

    def rows(self) -> FloatArray:
        """(rows, layers * width) of the last decode, in the order of its batch, rows of padding included.

        Raises:
            BackendError: the graph has no such nodes.
        """
        parts = [np.concatenate(found) for layer in self._layers if (found := self._found.get(layer))]
        if len(parts) < len(self._layers) or len({len(part) for part in parts}) > 1:
            raise BackendError(
                "This model does not expose the hidden states that the head reads.",
                f"Leave out {named('draft')}, or name an ordinary drafter.",
            )
        return np.concatenate(parts, axis=1)

    def require_rows(self, context: Context) -> None:
        """Make sure that a context shows what is to be copied, by a decode of one token; empties its cache.

        Raises:
            BackendError: it does not.
        """
        try:
            context.decode(TokenBatch.run([0, 0], 0, n_sequences=1, logits="last"))
        finally:
            context.clear()
        if len(self.rows()) < 2:
            raise BackendError(
                "This model exposes the hidden states of some rows only, but a head needs all."
            )
