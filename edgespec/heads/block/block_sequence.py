"""One sequence in a block head: the hidden states that were read of it, and the block behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.heads.block.block_context import BlockContext
from edgespec.heads.block.block_logits import BlockLogits
from edgespec.heads.shared.head_sequence import HeadSequence
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.tree import FloatArray


class BlockSequence(HeadSequence):
    """A sequence that a block head drafts for.

    Row r of the cache holds the feature of token r alone. It is known by the token that follows, as for other
    heads, so the rows up to the root's are read again after a change.

    Args:
        n_vocab: tokens that are drafted; padding at the end of the vocabulary is none.
        context: of the head.
    """

    def __init__(self, cache: KVCache, n_vocab: int, context: BlockContext) -> None:
        super().__init__(cache, n_vocab, context.width)
        self._context = context
        self._logits: BlockLogits | None = None

    @property
    def root(self) -> int:
        """The last token of the sequence."""
        return self._sequence[-1]

    def read_committed(self, most: int) -> None:
        """Read all pending rows, at most so many at a time."""
        while self.pending:
            piece = self.pending[:most]
            self.cache.append(self._sequence_batch(piece, "none"))
            self._note_read(len(piece))

    def block_batch(self) -> TokenBatch:
        """The rows of the block behind the sequence, all of which must have been read."""
        return self._context.block_batch(self.root, len(self.read))

    def keep_logits(self, logits: BlockLogits) -> None:
        """Keep what the head says of the block, and drop the block's rows from the cache."""
        size = self._context.head.block_size
        self.cache.commit(0, 0, 1, size)
        self._logits = logits

    def begin(self, sequence: Sequence[int]) -> None:
        """Begin a new tree after this sequence."""
        super().begin(sequence)
        self._logits = None

    def recover(self) -> None:
        """Return to the rows that were certainly read, and forget the last tree."""
        super().recover()
        self._logits = None

    def known(self, frontier: Frontier) -> NDArray[np.bool_]:
        """(nodes,) whether a node's candidates are known: all but the root's are when the block was read."""
        return np.asarray(frontier.nodes != 0)

    def logits_after(self, frontier: Frontier) -> tuple[list[int], list[FloatArray]]:
        """The logits after the nodes of a frontier that are not too deep.

        Returns:
            The indices of these nodes, by depth, and (nodes, n_vocab) logits after those of each depth.
        """
        assert self._logits is not None, "the block is read first"
        rows: list[int] = []
        found = []
        for depth in np.unique(frontier.depths).tolist():
            if depth < self._context.head.n_drafts:
                these = np.flatnonzero(frontier.depths == depth)
                rows += these.tolist()
                found.append(self._logits.after(depth, frontier.tokens[these]))
        return rows, found

    def ranked(self, frontier: Frontier, rows: list[int], logits: FloatArray) -> Children:
        """The candidates of a frontier, from the block."""
        del rows, logits
        children = Children.none(len(frontier.nodes), self.candidates.branching)
        places, parts = self.logits_after(frontier)
        for part in parts:
            these, places = places[: len(part)], places[len(part) :]
            best = self.candidates.ranked(frontier.part(these), range(len(these)), part)
            width = best.tokens.shape[1]
            children.tokens[these, :width], children.logprobs[these, :width] = best.tokens, best.logprobs
        return children

    def _sequence_batch(self, tokens: Sequence[int], logits: str) -> TokenBatch:
        del logits
        start = len(self.read) - self._first
        features = self._features[start : start + len(tokens)]
        return self._context.sequence_batch(features, len(self.read))
