"""The context of a block head: it reads a sequence's hidden states, and gives the logits of a whole block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.heads.block.block_head import BlockHead, read_block_head
from edgespec.heads.shared.head_context import HeadContext
from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.batch import EncoderBatch, TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header


class BlockContext(HeadContext):
    """A context of a block head beside its target's.

    The features that enter its cache are the target's hidden states as they are.

    Attributes:
        head: its header.
        width: elements of a token's features: those of all layers that it reads.

    Raises:
        ModelFileError: the head's file is damaged.
        MemoryLimitError: llama.cpp cannot allocate the context.
        UnsupportedBuild: this llama.cpp build has no heads.
    """

    def __init__(
        self,
        model: Model,
        beside: Context,
        *,
        n_cells: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
    ) -> None:
        self.head: BlockHead = read_block_head(read_header(model.path))
        super().__init__(
            model, beside, n_cells=n_cells, n_sequences=n_sequences, n_threads=n_threads, abort=abort
        )
        self._row_width = self.width
        self.width *= len(self.head.layers)
        self.set_causal(self.head.causal)
        if self.head.candidates:
            nextn.keep_states(self)

    def sequence_batch(self, features: FloatArray, start: int) -> FeatureBatch:
        """The rows that read features of a sequence from position `start` on.

        Args:
            features: (tokens, width).
        """
        return FeatureBatch.of_sequence(features, start, in_parts=self.model.has_position_parts)

    def block_batch(self, root: int, start: int) -> TokenBatch:
        """The rows of a block behind a sequence.

        Args:
            root: the last token, whose features are not known yet.
            start: its position.
        """
        tokens = [root] + [self.head.mask_token] * (self.head.block_size - 1)
        return TokenBatch.run(tokens, start, 1, "all")

    def pairs(self, blocks: int) -> tuple[FloatArray, FloatArray]:
        """The candidates of positions of the last blocks, and how well each follows those before it.

        For DFlash2. The first position of a block has none, and the candidates of the next one follow the
        root, so all rows of its scores are alike.

        Args:
            blocks: that were decoded together.

        Returns:
            Tokens (blocks, positions - 1, candidates), and scores (blocks, positions - 1, candidates,
            candidates): of each candidate of the position before, those of this position's.

        Raises:
            BackendError: there are none.
        """
        count, size = self.head.candidates, self.head.block_size
        rows = (
            nextn.kept_rows(self, blocks * size, self._row_width, "features")
            .copy()
            .reshape(blocks, size, -1)[:, 1:]
        )
        scores = rows[:, :, count : count + count * count].reshape(blocks, size - 1, count, count)
        return rows[:, :, :count], scores

    def draft_from_zeros(self, known: int) -> None:
        """Draft a block as if all that the head reads of its target were zero; see HeadContext."""
        self.decode(self.sequence_batch(np.zeros((known, self.width), dtype=np.float32), 0))
        self.decode(self.block_batch(0, known))
        self.logits()
        if self.head.candidates:
            self.pairs(1)


@dataclass(frozen=True)
class FeatureBatch(EncoderBatch):
    """Rows without tokens that enter a sequence's cache, and give no logits.

    Attributes:
        in_parts: whether positions have four parts (M-RoPE), of which sequences use the first three.
    """

    in_parts: bool = False

    @classmethod
    def of_sequence(cls, features: FloatArray, start: int, *, in_parts: bool) -> FeatureBatch:
        """Features at consecutive positions of sequence 0."""
        n = len(features)
        return cls(
            tokens=np.empty(0, dtype=np.int32),
            positions=np.arange(start, start + n, dtype=np.int32),
            sequence_ids=np.zeros(n, dtype=np.int32),
            offsets=np.arange(n + 1, dtype=np.int64),
            wants_logits=np.zeros(n, dtype=np.bool_),
            features=features,
            in_parts=in_parts,
        )

    def to_llama(self) -> tuple[Any, tuple[object, ...]]:
        """The C struct, and the arrays it points into, which must outlive it."""
        if not self.in_parts:
            return super().to_llama()
        sequence = self.positions
        positions = np.concatenate([sequence, sequence, sequence, np.zeros_like(sequence)])
        return EncoderBatch.to_llama(replace(self, positions=positions, in_parts=False))
