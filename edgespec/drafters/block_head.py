"""The drafter of block heads: one pass of the head gives a whole tree.

A block head (see `models.gguf.heads.block`) reads the target's hidden states of the text, and predicts a
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

from edgespec.drafters.block_logits import Bias, BiasedLogits, BlockLogits, IndependentLogits, PairedLogits
from edgespec.drafters.block_sequence import BlockSequence
from edgespec.drafters.head import HeadDrafter
from edgespec.models.llama.cache.kv_cache import KVCache, decode_together
from edgespec.models.llama.heads.blocks.context import BlockContext
from edgespec.models.llama.runtime.model import Model
from edgespec.speculation.drafters.base import DraftRequest
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.sampled_trees import Drawing, grow_drawn
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

_TRIAL_TEXT, _TRIAL_NEW = 32, 4  # tokens before the block that is timed, and those that are new to the head
_USUAL_PENDING = 8  # rows that are read in a usual round
_NO_LOGITS = np.empty((0, 0), dtype=np.float32)


class BlockHeadDrafter(HeadDrafter):
    """Drafts with a block head, for one text or for several at once; a `HiddenReader` of its target.

    Args:
        proposers: sources whose candidates are merged into the tree.
        bias: of a Markov head; None if it has none.
    """

    def __init__(
        self,
        model: Model,
        context: BlockContext,
        target_vocabulary: int,
        proposers: Sequence[Proposer] = (),
        bias: Bias | None = None,
    ) -> None:
        self._block = context
        self._bias = bias
        super().__init__(model, context, target_vocabulary, proposers)

    def _new_text(self, cache: KVCache) -> BlockSequence:
        return BlockSequence(cache, self._n_vocab, self._block)

    def draw(self, text: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        """A tree whose tokens are sampled from the head's distribution, if the text's features are known."""
        self.digest()
        if self._ready([text])[0] is None or self._lacks_room(len(text)):
            return DraftedTree(TokenTree.root_only(text[-1]))
        self._begin()
        (drafted,) = self._drafted = self._texts_for([(text, None, 0)])
        assert isinstance(drafted, BlockSequence)
        drafted.begin_candidates(None, None, None)
        self._read_blocks([drafted])

        def read(frontier: Frontier) -> tuple[list[int], FloatArray]:
            rows, parts = drafted.logits_after(frontier)
            return rows, np.concatenate(parts) if parts else _NO_LOGITS

        tree = grow_drawn(text[-1], read, drawing, width)
        self._changing = False
        return tree

    def step_seconds(self, rows: int) -> float:
        """Seconds of what a tree takes after a short text, whatever the rows; everything is forgotten."""
        self.forget()
        text, rng = self._texts[0], np.random.default_rng(rows)
        assert isinstance(text, BlockSequence)
        tokens = rng.integers(0, self._n_vocab, _TRIAL_TEXT + 1).tolist()
        features = rng.standard_normal((_TRIAL_TEXT, self._block.width)).astype(np.float32)
        self._begin()
        text.add_features(tokens[:-1], 0, features)
        text.begin(tokens[: 1 - _TRIAL_NEW])
        text.keep_accepted(None)
        text.read_text(self._context.n_rows)
        text.begin(tokens)
        text.keep_accepted(None)
        start = time.perf_counter()
        self._read_blocks([text])
        seconds = time.perf_counter() - start
        self.forget()
        return seconds

    def _with_room(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[int]:
        """The requests whose texts are ready, as far as the cache has room for their blocks."""
        size = self._block.head.block_size
        served = super()._with_room(requests, replace(limits, budget=max(limits.budget, size)))
        return served[: self._context.n_cells // size]

    def _lacks_room(self, tokens: int) -> bool:
        return tokens + self._block.head.block_size > self._context.n_cells

    def close(self) -> None:
        """Free the context and the weights."""
        super().close()
        if self._bias is not None:
            self._bias.close()

    def _expand(self, frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
        """Expand several trees: their blocks are read with the roots."""
        texts = [self._drafted[place] for place, _ in frontiers]
        roots = [text for text, (_, f) in zip(texts, frontiers, strict=True) if f.nodes[0] == 0]
        self._read_blocks([text for text in roots if isinstance(text, BlockSequence)])
        return [
            text.joined(frontier, text.ranked(frontier, [], _NO_LOGITS))
            for text, (_, frontier) in zip(texts, frontiers, strict=True)
        ]

    def _known(self, place: int, frontier: Frontier) -> NDArray[np.bool_]:
        return self._drafted[place].known(frontier)

    def _read_blocks(self, texts: Sequence[BlockSequence]) -> None:
        """Read what is new of texts, and the blocks behind them; as many together as a pass takes."""
        start, reads_text = time.perf_counter(), any(len(text.pending) > _USUAL_PENDING for text in texts)
        for text in texts:
            text.read_text(self._context.n_rows)
        if reads_text:
            self.text_s += time.perf_counter() - start
        most = self._context.n_rows // self._block.head.block_size
        for first in range(0, len(texts), most):
            part = texts[first : first + most]
            decode_together([(text.cache, text.block_batch()) for text in part], 0, certain=0)
            self.steps += 1
            self.rows += len(part)
            for text, logits in zip(part, self._logits_of(part), strict=True):
                text.keep_logits(logits)

    def _logits_of(self, texts: Sequence[BlockSequence]) -> list[BlockLogits]:
        """The logits of the blocks that were read last."""
        head = self._block.head
        if self._block.candidates:
            pairs = zip(*self._block.pairs(len(texts)), strict=True)
            return [PairedLogits(candidates, scores, self._n_vocab) for candidates, scores in pairs]
        logits = self._context.logits().reshape(len(texts), head.block_size, -1)
        found: list[BlockLogits] = []
        for text, block in zip(texts, logits, strict=True):
            drafts = block[head.block_size - head.n_drafts :, : self._n_vocab].copy()
            if self._bias is None:
                found.append(IndependentLogits(drafts))
            else:
                found.append(BiasedLogits(drafts, text.root, self._bias))
        return found
