"""A sequence, from its request to the end of its answer, and the batches of sequences that passes take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from edgespec.engine.requests import Request
from edgespec.generation.result import Chunk, PassRecord, PassTree
from edgespec.images.rows import PlacedImage
from edgespec.llama.cache.kv_cache import KVCache, common_prefix
from edgespec.llama.cache.positions import Positions, RowSpan
from edgespec.llama.cache.states import StateFile, StateStore
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.speculation.drafters.base import DraftMemory, ProposedBy
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import DecodingMethod
from edgespec.speculation.sizing.sizers import AdaptiveSizer, FixedSizer
from edgespec.speculation.sources.answers import AnswerSource
from edgespec.speculation.spliced import SplicedText
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

if TYPE_CHECKING:
    from edgespec.engine.answer import Answer
    from edgespec.engine.logprobs import PromptScores

Sizer = FixedSizer | AdaptiveSizer


class Status(Enum):
    WAITING = "for room in the cache"
    READING = "its prompt"
    RUNNING = "extended by passes"
    FINISHED = "kept in the cache for sequences that begin alike"


@dataclass(eq=False)
class TextSequence:
    """A prompt, and the answer to it as it grows.

    Its tokens are held here alone. The cache holds a beginning of them, `cached`; the last one is the root of
    the next tree, and is never in the cache.
    """

    tokens: list[int]  # prompt and answer so far; accepted tokens are appended
    _method: DecodingMethod | None = None
    end: int = 0  # most tokens that it may have
    _sizer: Sizer | None = None
    _answer: Answer | None = None
    # what it answers, if it shares passes with others; None once it is finished
    request: Request | None = None
    cache: KVCache | None = None  # its place in the target's cache; None while it has none
    # what the drafter keeps of it; stays with the place in the cache that another one takes
    memory: DraftMemory = field(default_factory=DraftMemory)
    # the log-probabilities of its prompt, as far as they are known; None if they are not wanted
    scores: PromptScores | None = None
    unread: int = 0  # tokens before the last one that the cache lacks; the next pass reads them
    # where its state alone is kept on disk; None if it has no store of its own
    store: StateStore | None = None
    state: StateFile | None = None  # what the cache held of it, while it waits for room there again
    started: bool = False  # whether any of its tokens were read for it alone
    read: int = 0  # tokens of its prompt that were read for it
    to_read: int = 0  # tokens of its prompt that were not known when it was given its place in the cache
    # its latest tree with drafted tokens, and what was accepted of it
    last_round: tuple[TokenTree, Acceptance] | None = None
    error: Exception | None = None  # what went wrong with this sequence alone in its latest pass
    # who proposed the nodes of its latest tree below the root, if it is traced
    proposed_by: list[ProposedBy] = field(default_factory=list)
    images: Sequence[PlacedImage] = ()  # those among its tokens, in order
    # what its answer is added to, for the drafts of others; None if they have none
    said: AnswerSource | None = None
    _spliced: SplicedText | None = None

    @property
    def text(self) -> list[int]:
        """Its tokens without those of images: what is drafted from, and what the choice of tokens sees."""
        if self.images and self._spliced is None:
            self._spliced = SplicedText(self.tokens)
        return self.tokens if self._spliced is None else self._spliced

    def next_image(self, start: int) -> PlacedImage | None:
        """The first image that ends behind a position."""
        return next((image for image in self.images if image.end > start), None)

    @property
    def positions(self) -> Positions:
        return Positions(
            RowSpan(image.start, len(image.rows), image.rows.positions)
            for image in self.images
            if image.rows.places is not None
        )

    @property
    def missing_text(self) -> int:
        """Tokens that must be read before it can be extended, or before its next image."""
        image = self.next_image(self.n_cached)
        return self.missing if image is None else min(self.missing, max(image.start - self.n_cached, 0))

    @property
    def is_at_image(self) -> bool:
        """True if rows of an image are what must be read next."""
        image = self.next_image(self.n_cached)
        return image is not None and image.start <= self.n_cached

    def between_images(self, length: int) -> int:
        """A length, or less, that ends within no image: each is read as a whole or not at all."""
        image = self.next_image(length)
        return min(length, image.start) if image is not None else length

    @property
    def status(self) -> Status:
        if self._answer is None:
            return Status.FINISHED
        if self.cache is None:
            return Status.WAITING
        return Status.READING if self.missing else Status.RUNNING

    @property
    def method(self) -> DecodingMethod:
        """The way its tokens are drafted and accepted, until it is finished."""
        assert self._method is not None, "the sequence is finished"
        return self._method

    @property
    def sizer(self) -> Sizer:
        """Decides how large its trees are while it has passes to itself, until it is finished."""
        assert self._sizer is not None, "the sequence is finished"
        return self._sizer

    @property
    def answer(self) -> Answer:
        assert self._answer is not None, "the sequence is finished"
        return self._answer

    @property
    def kv_cache(self) -> KVCache:
        """Its cells in the target's cache, which it must have."""
        assert self.cache is not None, "the sequence is not in the cache"
        return self.cache

    @property
    def n_cached(self) -> int:
        """The number of its tokens that the cache holds."""
        return 0 if self.cache is None else min(self.cache.length, len(self.tokens))

    @property
    def cached(self) -> list[int]:
        """The tokens that the cache holds."""
        return self.tokens[: self.n_cached]

    @property
    def missing(self) -> int:
        """Tokens that must be read before it can be extended; the last one is read by the next pass."""
        return max(len(self.tokens) - 1 - self.n_cached, 0)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return max(self.end - len(self.tokens), 0)

    @property
    def is_full(self) -> bool:
        """True if it has as many tokens as it may have."""
        return not self.left

    @property
    def is_traced(self) -> bool:
        """True if its chunks show the trees of its passes."""
        return self.request is not None and self.request.traced

    def shared_with(self, other: TextSequence) -> int:
        """The number of its first tokens that need not be read, as another one has them in the cache."""
        held = min(common_prefix(other.tokens, self.tokens), other.n_cached, len(self.tokens) - 1)
        held = self.between_images(held)
        return held if self.scores is None else self.scores.shareable(other.scores, held)

    def will_share(self, other: TextSequence) -> int:
        """The number of its first tokens to share with another one once that one has read them."""
        alike = min(common_prefix(other.tokens, self.tokens), len(other.tokens) - 1, len(self.tokens) - 1)
        alike = self.between_images(alike)
        return alike if self.scores is None else self.scores.will_share(other.scores, alike)

    def readable(self, logits: int) -> int:
        """The number of its tokens that a pass with so many rows of logits can read next."""
        if self.scores is None:
            return self.missing_text
        return min(self.missing, max(self.scores.covered - self.n_cached, 0) + logits)

    def rewind(self, length: int) -> None:
        """Make the cache forget it from `length` on."""
        self.kv_cache.rewind(length)

    def forget_part_of_image(self) -> None:
        """Make the cache forget an image of which it has only a part, which is of no use."""
        if self.is_at_image:
            self.rewind(self.between_images(self.n_cached))

    def score_prompt(self, first: int) -> None:
        """Record the log-probabilities of its prompt's tokens, from this position on."""
        self.scores = self.answer.score_prompt(self.tokens, first)

    def clamp(self, limits: TreeLimits) -> TreeLimits:
        """Limits of a tree that leaves room for the bonus token, which follows the accepted path."""
        return replace(limits, depth=min(limits.depth, self.end - len(self.tokens) - 1))

    def accept(self, draft: DraftedTree, logits: FloatArray) -> Sequence[int]:
        """Append the accepted tokens and the bonus token; returns the accepted path.

        If the choice of tokens fails, `error` says why, and the path is empty.

        Args:
            logits: (nodes, n_vocab) the target's.
        """
        text = self.text
        length = len(text)
        try:
            accepted = self.method.accept(draft, logits, text)
        except Exception as error:  # a bug, too: it has changed nothing but the method of this sequence
            del text[length:]
            self.error = error
            return ()
        if text is not self.tokens:
            self.tokens += text[length:]
        if self._answer is not None and self._answer.on_accept is not None:
            self._answer.on_accept(logits, draft.tree, accepted)
        if len(draft.tree) > 1:
            self.last_round = draft.tree, accepted
        return accepted.path

    def add(self, record: PassRecord, vocabulary: Vocabulary) -> Chunk:
        """Add what its latest pass appended to its answer."""
        chunk = self.answer.add(self.tokens, record)
        if self.said is not None:
            self.said.extend(chunk.tokens)
        return replace(chunk, tree=self._pass_tree(record.nodes, vocabulary)) if self.is_traced else chunk

    def finish(self) -> None:
        """Forget all but the tokens that the cache holds, which other sequences may share."""
        del self.tokens[self.n_cached :]
        self._method = self._sizer = self._answer = self.request = self.said = None
        self._spliced = SplicedText(self.tokens) if self.images else None
        self.images = ()
        self.discard_state()

    def tell_progress(self) -> None:
        """Report prefill progress to the request's callback."""
        if self.request is not None and self.request.on_prefill is not None:
            self.request.on_prefill(self.to_read - self.missing, self.to_read)

    def discard_state(self) -> None:
        """Free the disk space of what was set aside."""
        if self.state is not None:
            self.state.close()
            self.state = None

    def _pass_tree(self, nodes: int, vocabulary: Vocabulary) -> PassTree:
        """Its latest tree with the tokens spelled out.

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
class SequenceTree:
    """A sequence, and a tree of possible continuations, whose root is the sequence's last token."""

    sequence: TextSequence
    tree: TokenTree


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of a sequence whose prompt is being read."""

    sequence: TextSequence
    start: int  # position of the first
    tokens: Sequence[int]

    @classmethod
    def next_of(cls, sequence: TextSequence, size: int) -> PromptChunk:
        """The next `size` tokens of a sequence, or fewer if there are no more."""
        start = sequence.n_cached
        return cls(sequence, start, sequence.tokens[start : min(start + size, len(sequence.tokens))])

    @property
    def scored(self) -> range:
        """The rows whose log-probabilities are wanted."""
        if self.sequence.scores is None:
            return range(0)
        rows = self.sequence.scores.rows(self.start, self.start + len(self.tokens))
        return range(rows.start - self.start, rows.stop - self.start)

    def score(self, row: int, logits: FloatArray) -> None:
        """Take the logits of consecutive rows of the chunk that are `scored`, the first of which is `row`."""
        assert self.sequence.scores is not None
        self.sequence.scores.add(self.start + row, logits)


@dataclass(frozen=True)
class Batch:
    """The sequences that one pass extends, and the chunks of prompts that it reads beside them.

    A sequence that has the pass to itself is free in two ways that a shared pass is not: its trees follow its
    own sizer, and its method may prescribe them. See `sole_sequence`.
    """

    sequences: Sequence[TextSequence]
    chunks: Sequence[PromptChunk] = ()
    max_rows: int = 0  # most rows of a shared pass

    @property
    def sole_sequence(self) -> TextSequence | None:
        """The sequence that has the pass to itself; None if it is shared."""
        return self.sequences[0] if len(self.sequences) == 1 and not self.chunks else None

    @property
    def chunk_rows(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def prompt_rows(self) -> int:
        """Rows that read the rest of the sequences' own prompts."""
        return sum(sequence.unread for sequence in self.sequences)

    @property
    def other_rows(self) -> int:
        """Rows that are no nodes: those of prompts."""
        return self.prompt_rows + self.chunk_rows

    @property
    def scored_rows(self) -> int:
        """Rows of prompts whose logits are wanted."""
        return sum(len(chunk.scored) for chunk in self.chunks)

    def accept(self, drafts: Iterable[DraftedTree], logits: Iterable[FloatArray]) -> list[Sequence[int]]:
        """Extend each sequence by what the target chose; returns the accepted path of each tree."""
        return [
            sequence.accept(draft, rows)
            for sequence, draft, rows in zip(self.sequences, drafts, logits, strict=True)
        ]

    def trees(self, drafts: Iterable[DraftedTree]) -> list[SequenceTree]:
        """The trees that the target is to verify."""
        return [
            SequenceTree(sequence, draft.tree) for sequence, draft in zip(self.sequences, drafts, strict=True)
        ]
