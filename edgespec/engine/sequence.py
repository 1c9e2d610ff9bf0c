"""Sequences that are being extended, and the batches of them that passes take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.engine.passes import CachedSequence, PromptChunk, SequenceTree
from edgespec.generation.result import PassTree
from edgespec.llama.cache.states import StateStore
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.speculation.drafters.base import ProposedBy
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import DecodingMethod
from edgespec.speculation.sizing.sizers import AdaptiveSizer, FixedSizer
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

Sizer = FixedSizer | AdaptiveSizer


@dataclass
class RunningSequence:
    """A sequence that is being extended.

    Attributes:
        tokens: prompt and answer so far; accepted tokens are appended. The target's cache holds all but the
            last one, which becomes the root of the next tree.
        method: how its tokens are drafted and accepted.
        end: most tokens that it may have.
        sizer: decides how large its trees are while it has passes to itself.
        cached: its entry in the target's cache; None for the target's own.
        unread: tokens before the last one that the target's cache lacks; the next pass reads them.
        store: where the target's state of this sequence is kept on disk; None if it has no store of its own.
        last_round: its latest tree with drafted tokens, and what was accepted of it.
        error: what went wrong with this sequence alone in its latest pass.
        traced: note who proposes its tokens.
        proposed_by: who proposed the nodes of its latest tree below the root, if it is traced.
        on_accept: called with the target's logits (nodes, n_vocab), the tree and what was accepted of it.
    """

    tokens: list[int]
    method: DecodingMethod
    end: int
    sizer: Sizer
    cached: CachedSequence | None = None
    unread: int = 0
    store: StateStore | None = None
    last_round: tuple[TokenTree, Acceptance] | None = None
    error: Exception | None = None
    traced: bool = False
    proposed_by: list[ProposedBy] = field(default_factory=list)
    on_accept: Callable[[FloatArray, TokenTree, Acceptance], None] | None = None

    def clamp(self, limits: TreeLimits) -> TreeLimits:
        """Limits of a tree that leaves room for the bonus token, which follows the accepted path."""
        return replace(limits, depth=min(limits.depth, self.end - len(self.tokens) - 1))

    def accept(self, draft: DraftedTree, logits: FloatArray) -> Sequence[int]:
        """Append the accepted tokens and the bonus token; returns the accepted path.

        If the choice of tokens fails, `error` says why, and the path is empty.

        Args:
            logits: (nodes, n_vocab) the target's.
        """
        length = len(self.tokens)
        try:
            accepted = self.method.accept(draft, logits, self.tokens)
        except Exception as error:  # a bug, too: it has changed nothing but the method of this sequence
            del self.tokens[length:]
            self.error = error
            return ()
        if self.on_accept is not None:
            self.on_accept(logits, draft.tree, accepted)
        if len(draft.tree) > 1:
            self.last_round = draft.tree, accepted
        return accepted.path

    def pass_tree(self, nodes: int, vocabulary: Vocabulary) -> PassTree:
        """Return its latest tree with the tokens spelled out, if it is traced.

        Args:
            nodes: of the pass; a pass without drafts has one, and the sequence has kept no tree.
        """

        def spelled(token: int) -> str:
            return vocabulary.piece(token, control=True).decode("utf-8", "replace")

        if nodes < 2 or self.last_round is None:
            before, last = self.tokens[-2:]
            return PassTree((spelled(before),), (-1,), (1.0,), ("",), (0,), spelled(last))
        tree, accepted = self.last_round
        above = np.where(tree.parents >= 0, tree.logprobs[tree.parents], 0)
        chances = np.exp(np.minimum(tree.logprobs - above, 0))
        return PassTree(
            tokens=tuple(map(spelled, tree.tokens.tolist())),
            parents=tuple(tree.parents.tolist()),
            chances=tuple(round(float(chance), 3) for chance in chances),
            sources=("", *self.proposed_by),
            path=tuple(accepted.path),
            bonus=spelled(accepted.bonus),
        )


@dataclass(frozen=True)
class Batch:
    """The sequences that one pass extends, and the chunks of prompts that it reads beside them.

    A sequence that has the pass to itself is free in two ways that a shared pass is not: its trees follow its
    own sizer, and its method may prescribe them. See `dedicated_to`.

    Attributes:
        max_rows: most rows of a shared pass.
    """

    sequences: Sequence[RunningSequence]
    chunks: Sequence[PromptChunk] = ()
    max_rows: int = 0

    @property
    def dedicated_to(self) -> RunningSequence | None:
        """The sequence that has the pass to itself; None if it is shared."""
        return self.sequences[0] if len(self.sequences) == 1 and not self.chunks else None

    @property
    def other_rows(self) -> int:
        """Rows that are no nodes: those of prompts."""
        return sum(s.unread for s in self.sequences) + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def scored_rows(self) -> int:
        """Rows of prompts whose logits are wanted."""
        return sum(len(chunk.scored) for chunk in self.chunks)

    def trees(self, drafts: Sequence[DraftedTree]) -> list[SequenceTree]:
        """The trees that the target is to verify."""
        return [
            SequenceTree(sequence.tokens, draft.tree, sequence.cached, sequence.unread, sequence.store)
            for sequence, draft in zip(self.sequences, drafts, strict=True)
        ]
