"""Reading a model's last states while it computes, for layers of multi-token prediction and assistants.

These read the state of a token behind all of the model's own layers. llama.cpp copies it for every
row, those without logits included, and computes the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.errors import BackendError
from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.graph import GraphObserver


class LastStates:
    """Shows the last states of every decode of a context: a source of hidden states, like LayerTap.

    Args:
        width: elements of a state.

    Attributes:
        observers: of the graph that it needs: none.
    """

    observers: Sequence[GraphObserver] = ()

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
