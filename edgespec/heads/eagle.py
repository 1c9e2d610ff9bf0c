"""EAGLE-3 heads: their files and contexts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.heads.head import HeadHeader, LayerHead, read_fields, read_layers
from edgespec.heads.head_context import HeadContext
from edgespec.llama.runtime.batch import EncoderBatch
from edgespec.llama.runtime.context import FloatArray
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import GGUFHeader


@dataclass(frozen=True)
class EagleHead(LayerHead):
    """The header of an EAGLE-3 head."""


def read_eagle_head(header: GGUFHeader) -> EagleHead:
    head = HeadHeader(header)
    layers = read_layers(head)
    target_width, width = head.count("target_hidden_size"), head.count("embedding_length")
    if head.count("block_count") != 1:
        head.refuse("it has more than one layer")
    return EagleHead(**read_fields(head, layers, target_width, width))


class EagleContext(HeadContext):
    """A context of an EAGLE-3 head beside its target's.

    The head has an encoder, which makes a token's feature of its hidden states.
    """

    # Encoding wants a sequence, and leaves it empty: no text may have it.
    _encoding_sequences = 1

    @property
    def shown_width(self) -> int:
        """Elements of the hidden states of a token; see HeadContext."""
        return read_eagle_head(read_header(self.model.path)).shown_width

    def encode(self, hidden: FloatArray) -> FloatArray:
        """The features (tokens, width) of tokens, computed by the head; see HeadContext."""
        features = np.empty((len(hidden), self.width), dtype=np.float32)
        for start in range(0, len(hidden), self.n_rows):
            piece = hidden[start : start + self.n_rows]
            self.run_encoder(EncoderBatch.of(piece, self.n_sequences))
            features[start : start + len(piece)] = self.features(len(piece))
        return features
