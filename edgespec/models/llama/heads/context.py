"""The contexts of draft heads: they make features of a target's hidden states, and read tokens beside them.

A head reads rows of a token and the feature of the token before it, and gives logits and a feature of its own
for each, which takes the place of the target's for drafted tokens. Features are made of the target's hidden
states by the encoder of a head in a file of its own. For a layer of the target's file, they are these states.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod

import llama_cpp
import numpy as np

from edgespec.errors import BackendError
from edgespec.models.llama.heads import nextn
from edgespec.models.llama.runtime import forks
from edgespec.models.llama.runtime.abort import AbortFlag
from edgespec.models.llama.runtime.batch import EncoderBatch
from edgespec.models.llama.runtime.context import Context, FloatArray
from edgespec.models.llama.runtime.model import Model

HEAD_ROWS = 64  # of a decode: the head computes the logits of all of them, wanted or not
# For texts and branches; encoding takes one more. llama.cpp plans a row of logits for each sequence, and
# aborts where they are more than the rows of a decode.
MOST_HEAD_SEQUENCES = HEAD_ROWS - 1


class HeadContext(Context):
    """A context of a head; see EagleContext and MTPContext.

    Every decode must want the logits of all its rows, or of none: the head computes all of them, and
    llama.cpp keeps the first ones.

    Args:
        beside: the target's context, whose model the head borrows matrices of; None for layers of the target.

    Attributes:
        width: elements of a feature.

    Raises:
        MemoryLimitError: llama.cpp cannot allocate the context.
        UnsupportedBuild: this llama.cpp build has no heads.
    """

    _encoding_sequences = 0  # sequences that encoding takes, besides those of texts

    def __init__(
        self,
        model: Model,
        beside: Context | None = None,
        *,
        n_cells: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
    ) -> None:
        n_sequences = min(n_sequences, MOST_HEAD_SEQUENCES)
        super().__init__(
            model,
            n_cells=n_cells,
            n_rows=HEAD_ROWS,
            n_outputs=HEAD_ROWS,
            n_sequences=n_sequences + self._encoding_sequences,
            n_threads=n_threads,
            abort=abort,
            beside=beside,
            mtp=beside is None,
        )
        self.n_sequences = n_sequences
        self.n_outputs = HEAD_ROWS
        self.width = int(llama_cpp.llama_model_n_embd(model.handle))
        nextn.keep_features(self.handle)

    @abstractmethod
    def encode(self, hidden: FloatArray) -> FloatArray:
        """The features (tokens, width) of tokens.

        Args:
            hidden: (tokens, width of what the target shows) their hidden states.

        Raises:
            DecodeAborted: the abort flag was set.
            BackendError: llama.cpp refused the batch, or the context is closed.
        """

    def features(self, rows: int) -> FloatArray:
        """(rows, width) of the first rows of the last call whose outputs were wanted: a copy.

        Raises:
            BackendError: there are none.
        """
        return self._states(rows, self.width)

    def _states(self, rows: int, width: int) -> FloatArray:
        """(rows, width) of the first rows of the last call that llama.cpp keeps states of: a copy."""
        llama_cpp.llama_synchronize(self.handle)
        start = nextn.features_address(self.handle)
        if not start:
            raise BackendError("llama.cpp has no features to read.")
        memory = (ctypes.c_float * (rows * width)).from_address(start)
        return np.array(memory, dtype=np.float32).reshape(rows, width)


class EagleContext(HeadContext):
    """A context of an EAGLE-3 head beside its target's.

    The head has an encoder, which makes a token's feature of its hidden states.
    """

    # Encoding wants a sequence, and leaves it empty: no text may have it.
    _encoding_sequences = 1

    def encode(self, hidden: FloatArray) -> FloatArray:
        """The features (tokens, width) of tokens, computed by the head; see HeadContext."""
        features = np.empty((len(hidden), self.width), dtype=np.float32)
        for start in range(0, len(hidden), self.n_rows):
            piece = hidden[start : start + self.n_rows]
            forks.has_computed()
            struct, keep_alive = EncoderBatch.of(piece, self.n_sequences).to_llama()
            self._compute(llama_cpp.llama_encode, self.handle, struct)
            del keep_alive
            features[start : start + len(piece)] = self.features(len(piece))
        return features


class MTPContext(HeadContext):
    """A context of a model's own layers for multi-token prediction.

    Their features are the model's last states, which it shows as they are. `beside` is None, and the model is
    the target, loaded with these layers.
    """

    def encode(self, hidden: FloatArray) -> FloatArray:
        """The hidden states themselves."""
        return hidden
