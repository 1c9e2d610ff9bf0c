"""The inputs and outputs of a pass of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.engine.scoring import PromptScores
from edgespec.generation.expert_use import ExpertUse
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.cache.states import StateStore
from edgespec.speculation.tree import FloatArray, TokenTree


class CachedSequence:
    """A sequence in the target's cache.

    Attributes:
        cache: its cells.
        tokens: the tokens whose keys and values are in them.
        scores: the log-probabilities that its rows gave of the prompt that was read; None if none are wanted.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.tokens: list[int] = []
        self.scores: PromptScores | None = None

    def rewind(self, length: int) -> None:
        """Forget the sequence from `length` on."""
        self.cache.rewind(length)
        del self.tokens[self.cache.length :]


@dataclass(frozen=True)
class SequenceTree:
    """A sequence, and a tree of possible continuations, whose root is the sequence's last token.

    Attributes:
        cached: where the sequence is cached, except its last tokens; None for the target's own sequence.
        unread: tokens before the last one that are not cached either, and are read in the tree's pass.
        store: where the state of this sequence is kept on disk; None if it has no store of its own.
    """

    tokens: Sequence[int]
    tree: TokenTree
    cached: CachedSequence | None = None
    unread: int = 0
    store: StateStore | None = None


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of a prompt that is being read."""

    cached: CachedSequence
    tokens: Sequence[int]

    @property
    def scored(self) -> range:
        """The rows whose log-probabilities are wanted."""
        scores, start = self.cached.scores, len(self.cached.tokens)
        if scores is None:
            return range(0)
        rows = scores.rows(start, start + len(self.tokens))
        return range(rows.start - start, rows.stop - start)

    def score(self, start: int, logits: FloatArray) -> None:
        """Take the logits of the rows that are `scored`, the first of which is the sequence's row `start`."""
        assert self.cached.scores is not None
        self.cached.scores.add(start, logits)


@dataclass(frozen=True)
class VerifiedTree:
    """The result of a pass for one tree.

    Attributes:
        logits: (nodes, n_vocab) logits after each node; a view, valid until the next pass.
    """

    logits: FloatArray


@dataclass(frozen=True)
class TargetPass:
    """A pass of the target.

    Attributes:
        verified: the result for each tree, in the given order.
        waited_s: seconds that the pass waited for streamed weights.
        experts: what it needed of those that are streamed one by one; None if none are.
        setup_s: seconds of the pass for what is needed once for its number of rows.
    """

    verified: tuple[VerifiedTree, ...]
    waited_s: float
    experts: ExpertUse | None = None
    setup_s: float = 0.0
