"""The drafter of block heads: one pass of the head gives a whole tree.

A block head (see `block_head`) reads the target's hidden states of the sequence, and predicts a
block of tokens behind it in one pass. The tree is the best one by the product of the positions' chances
(DDTree, arXiv 2604.12989), found by the same search as the trees of models. Only the root costs a pass: all
other nodes are known by then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.draft_sequences import Wanted
from edgespec.heads.block import BlockContext, BlockLogits, IndependentLogits, PairedLogits
from edgespec.heads.head_drafter import HeadDrafter
from edgespec.heads.head_sequence import HeadSequence
from edgespec.llama.cache.kv_cache import KVCache, decode_together
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.model import Model
from edgespec.speculation.drafters.base import DraftRequest
from edgespec.speculation.drafters.candidates import TreeCandidates
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.sampled_trees import Drawing, grow_drawn
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree


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


_TRIAL_TEXT, _TRIAL_NEW = 32, 4  # tokens before the block that is timed, and those that are new to the head
_USUAL_PENDING = 8  # rows that are read in a usual round
_NO_LOGITS = np.empty((0, 0), dtype=np.float32)


class BlockHeadDrafter(HeadDrafter):
    """Drafts with a block head, for one sequence or for several at once; a `HiddenReader` of its target.

    Args:
        proposers: sources whose candidates are merged into the tree.
    """

    def __init__(
        self,
        model: Model,
        context: BlockContext,
        target_vocabulary: int,
        proposers: Sequence[Proposer] = (),
    ) -> None:
        self._block = context
        super().__init__(model, context, target_vocabulary, proposers)

    def _new_sequence(self, cache: KVCache) -> BlockSequence:
        return BlockSequence(cache, self._n_vocab, self._block)

    def draw(self, sequence: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        """A tree of tokens sampled from the head's distribution, if the sequence's features are known."""
        self.digest()
        if self._ready(sequence) is None or self._lacks_room(len(sequence)):
            return DraftedTree(TokenTree.root_only(sequence[-1]))
        self._begin()
        (drafted,) = self._drafted = self._sequences_for([Wanted(sequence)])
        assert isinstance(drafted, BlockSequence)
        drafted.candidates = TreeCandidates(sequence)
        self._read_blocks([drafted])

        def read(frontier: Frontier) -> tuple[list[int], FloatArray]:
            rows, parts = drafted.logits_after(frontier)
            return rows, np.concatenate(parts) if parts else _NO_LOGITS

        tree = grow_drawn(sequence[-1], read, drawing, width)
        self._changing = False
        return tree

    def step_seconds(self, rows: int) -> float:
        """Seconds of what a tree takes after a short sequence, whatever the rows; everything is forgotten."""
        self.forget()
        sequence, rng = self._sequences[0], np.random.default_rng(rows)
        assert isinstance(sequence, BlockSequence)
        tokens = rng.integers(0, self._n_vocab, _TRIAL_TEXT + 1).tolist()
        features = rng.standard_normal((_TRIAL_TEXT, self._block.width)).astype(np.float32)
        self._begin()
        sequence.add_features(tokens[:-1], 0, features)
        sequence.begin(tokens[: 1 - _TRIAL_NEW])
        sequence.keep_accepted(None)
        sequence.read_committed(self._context.n_rows)
        sequence.begin(tokens)
        sequence.keep_accepted(None)
        start = time.perf_counter()
        self._read_blocks([sequence])
        seconds = time.perf_counter() - start
        self.forget()
        return seconds

    def _with_room(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[int]:
        """The requests whose sequences are ready, as far as the cache has room for their blocks."""
        size = self._block.head.block_size
        served = super()._with_room(requests, replace(limits, budget=max(limits.budget, size)))
        return served[: self._context.n_cells // size]

    def _lacks_room(self, tokens: int) -> bool:
        return tokens + self._block.head.block_size > self._context.n_cells

    def _expand(self, frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
        """Expand several trees: their blocks are read with the roots."""
        sequences = [self._drafted[place] for place, _ in frontiers]
        roots = [sequence for sequence, (_, f) in zip(sequences, frontiers, strict=True) if f.nodes[0] == 0]
        self._read_blocks([sequence for sequence in roots if isinstance(sequence, BlockSequence)])
        return [
            sequence.candidates.joined(frontier, sequence.ranked(frontier, [], _NO_LOGITS))
            for sequence, (_, frontier) in zip(sequences, frontiers, strict=True)
        ]

    def _known(self, place: int, frontier: Frontier) -> NDArray[np.bool_]:
        return self._drafted[place].known(frontier)

    def _read_blocks(self, sequences: Sequence[BlockSequence]) -> None:
        """Read what is new of sequences, and the blocks behind them; as many together as a pass takes."""
        start, reads_sequence = (
            time.perf_counter(),
            any(len(sequence.pending) > _USUAL_PENDING for sequence in sequences),
        )
        for sequence in sequences:
            sequence.read_committed(self._context.n_rows)
        if reads_sequence:
            self.text_s += time.perf_counter() - start
        most = self._context.n_rows // self._block.head.block_size
        for first in range(0, len(sequences), most):
            part = sequences[first : first + most]
            decode_together([(sequence.cache, sequence.block_batch()) for sequence in part], 0, certain=0)
            self.steps += 1
            self.rows += len(part)
            for sequence, logits in zip(part, self._logits_of(part), strict=True):
                sequence.keep_logits(logits)

    def _logits_of(self, sequences: Sequence[BlockSequence]) -> list[BlockLogits]:
        """The logits of the blocks that were read last."""
        head = self._block.head
        if head.candidates:
            pairs = zip(*self._block.pairs(len(sequences)), strict=True)
            return [PairedLogits(candidates, scores, self._n_vocab) for candidates, scores in pairs]
        logits = self._context.logits().reshape(len(sequences), head.block_size, -1)
        return [IndependentLogits(block[1:, : self._n_vocab].copy()) for block in logits]
