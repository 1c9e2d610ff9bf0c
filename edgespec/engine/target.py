"""The target: verifies a whole token tree per pass, and caches the text that was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from edgespec.generation.expert_use import ExpertUse
from edgespec.models.llama.cache.states import StateStore
from edgespec.models.llama.cache.text_cache import (
    TextCache,
    close_all_but,
    common_prefix,
    decode_together,
    inherit,
    open_beside,
    open_cache,
)
from edgespec.models.llama.prefill_chunks import PrefillChunks
from edgespec.models.llama.row_rule import RowRule
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context, FloatArray
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.runtime.residency import Meanwhile
from edgespec.speculation.tree import TokenTree


class CachedText:
    """A text in the target's cache.

    Attributes:
        cache: its cells.
        tokens: the tokens whose keys and values are in them.
    """

    def __init__(self, cache: TextCache) -> None:
        self.cache = cache
        self.tokens: list[int] = []

    def rewind(self, length: int) -> None:
        """Forget the text from `length` on."""
        self.cache.rewind(length)
        del self.tokens[self.cache.length :]


@dataclass(frozen=True)
class TextTree:
    """A text, and a tree of possible continuations, whose root is the text's last token.

    Attributes:
        cached: where the text is cached, except its last token; None for the target's own text.
    """

    text: Sequence[int]
    tree: TokenTree
    cached: CachedText | None = None


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of a prompt that is being read."""

    cached: CachedText
    tokens: Sequence[int]


@dataclass(frozen=True)
class Verified:
    """The result of a pass for one tree.

    Attributes:
        logits: (nodes, n_vocab) logits after each node; a view, valid until the next pass.
    """

    logits: FloatArray


@dataclass(frozen=True)
class TargetPass:
    """One pass of the target.

    Attributes:
        verified: the result for each tree, in the given order.
        waited_s: seconds that the pass waited for streamed weights.
        experts: what it needed of those that are streamed one by one; None if none are.
    """

    verified: tuple[Verified, ...]
    waited_s: float
    experts: ExpertUse | None = None


class HiddenStates(Protocol):
    """Where the hidden states of the last decode are; see models.llama.heads.tap."""

    def rows(self) -> FloatArray: ...


class HiddenReader(Protocol):
    """Is given the hidden states of what becomes text: a drafter that has a use for them."""

    def take(self, cached: CachedText, start: int, hidden: FloatArray) -> None:
        """Tokens of a text were read. Computes nothing, so it cannot be interrupted.

        Args:
            cached: holds the text, up to the last of these tokens.
            start: of the first.
            hidden: (tokens, width) of each.
        """

    def digest(self) -> None:
        """Compute what is wanted of the hidden states that were taken, so that they need not be kept.

        Raises:
            DecodeAborted: stopped from outside; the rest is computed later.
        """

    def closed(self, cached: CachedText) -> None:
        """A text was forgotten, and its place in the cache with it."""


class Target:
    """Verifies trees of one or more texts in one pass, and keeps the accepted paths in its cache.

    Every call is atomic as far as later calls can tell: whatever it raises and wherever it is interrupted,
    the next call first discards what it left in the cache. The cached texts may then be shorter than before,
    and the missing parts are read again; they are never different texts.

    There is always one text, the target's own, for callers that have a single one. Others are opened beside
    it, and share its cells.

    Attributes:
        rule: the row rule in force; None lets the number of rows choose the kernels.
        max_nodes: most rows of a pass in which logits are wanted.
        max_leaves: most leaves of a tree.
        max_texts: most texts in the cache.
        identity: everything that the contents of the cache depend on, except the tokens.
        stores: where the states of texts are kept on disk.
        pieces: under a row rule, the longer pieces that prompts may be read in; None allows none.
    """

    def __init__(self, model: Model, context: Context, rule: RowRule | None) -> None:
        self.model = model
        self.rule = rule
        self.context = context
        self.own = CachedText(open_cache(context, ordered=rule is not None))
        most = min(context.n_rows, context.n_outputs)
        self.max_nodes = min(most, rule.maximum) if rule else most
        self.max_leaves = self.cache.max_paths
        self.max_texts = max(self.max_leaves - 1, 1)  # saving a text's state takes an id of its own
        self.identity: dict[str, str] = {}
        self.stores: list[StateStore] = []
        self.pieces: PrefillChunks | None = None
        self._texts = [self.own]
        self._hidden: HiddenStates | None = None
        self._reader: HiddenReader | None = None
        self._tree_rows: list[int] = []  # the first row of each tree in the last pass
        self._changing = False  # a call has begun and not ended
        self._guessing = False  # trees were verified, but nothing of them is committed yet

    @property
    def cache(self) -> TextCache:
        """The cache of the target's own text."""
        return self.own.cache

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the target's own text whose keys and values are in the cache."""
        if self._changing:
            self._recover()
        return self.own.tokens

    @property
    def texts(self) -> Sequence[CachedText]:
        """All texts in the cache, the target's own first."""
        if self._changing:
            self._recover()
        return self._texts

    def show_hidden(self, hidden: HiddenStates, reader: HiddenReader) -> None:
        """Give a reader the hidden states of everything that becomes text from now on."""
        self._hidden, self._reader = hidden, reader

    def _show(self, cached: CachedText, start: int, rows: slice | Sequence[int]) -> None:
        """Show the reader the hidden states of some rows of the last decode, which are text now."""
        if self._hidden is not None and self._reader is not None:
            self._reader.take(cached, start, self._hidden.rows()[rows].copy())

    def open_text(self, tokens: Sequence[int]) -> CachedText:
        """A new text in the cache, which holds as much of the beginning of `tokens` as is known already.

        The cells of the longest beginning that another text has in common are shared. A recurrent state is
        that of a single text, so there this is the target's own.

        Raises:
            ValueError: there are `max_texts` texts already.
        """
        if self.max_texts == 1:
            self.recall(tokens)
            return self.own
        self._begin()
        cached = CachedText(open_beside(self.cache))
        self._texts.append(cached)
        source, shared = self._longest_prefix(cached, tokens)
        if shared:
            inherit(cached.cache, source.cache, shared)
            cached.tokens[:] = tokens[:shared]
        self._changing = False
        return cached

    def close_text(self, cached: CachedText) -> None:
        """Forget a text that was opened; the target's own stays."""
        if cached is self.own:
            return
        self._begin()
        cached.tokens.clear()
        cached.cache.close()
        self._texts.remove(cached)
        self._changing = False
        if self._reader is not None:
            self._reader.closed(cached)

    def shared_prefix(self, cached: CachedText, tokens: Sequence[int]) -> int:
        """The longest beginning of `tokens` that another text in the cache has."""
        return self._longest_prefix(cached, tokens)[1]

    def _longest_prefix(self, cached: CachedText, tokens: Sequence[int]) -> tuple[CachedText, int]:
        others = [other for other in self._texts if other is not cached]
        if not others:
            return cached, 0
        lengths = [common_prefix(other.tokens, tokens) for other in others]
        best = max(range(len(others)), key=lengths.__getitem__)
        return others[best], lengths[best]

    def prefill(self, tokens: Sequence[int], on_progress: Callable[[int, int], None] | None = None) -> int:
        """Make the target's own text exactly `tokens`, reusing what the cache already has of them.

        Returns:
            How many tokens had to be decoded.

        Raises:
            DecodeAborted: stopped from outside; what was read until then is kept, except by models with a
                recurrent state.
        """
        missing = len(tokens) - self.recall(tokens)
        read = 0
        while read < missing:
            if on_progress is not None and read == 0 and self._next_piece(missing)[0] < missing:
                on_progress(0, missing)
            read += self.read_chunk(tokens, self.own)
            if on_progress is not None:
                on_progress(read, missing)
        return missing

    def read_chunk(self, tokens: Sequence[int], cached: CachedText) -> int:
        """Read the next tokens of a text whose beginning is cached, in as large a chunk as possible.

        Under a row rule, prompts too are read in chunks that it allows. A token's keys and values then do not
        depend on how the text was split into passes, so a reused cache gives the same text as an empty one.
        Longer chunks are used only where they have been shown to give the same bits.

        Returns:
            How many tokens were read.

        Raises:
            DecodeAborted: as `prefill`.
        """
        self._begin()
        start = cached.cache.length
        n_tokens, rows = self._next_piece(len(tokens) - start)
        piece = tokens[start : start + n_tokens]
        if self.pieces is None or self.rule is None or self.pieces.is_proven(rows):
            self._read(cached, piece, rows)
        else:
            self._try_long(cached, piece, rows, self.pieces, self.rule)
        self.store_blocks(cached)
        self._changing = False
        if self._reader is not None:
            self._reader.digest()
        return n_tokens

    def store_blocks(self, cached: CachedText) -> None:
        """Write the whole blocks of a text that are not on disk yet to the stores."""
        for store in self.stores:
            store.keep(cached.cache, cached.tokens, tail=False)

    @property
    def prompt_rows(self) -> int:
        """Most rows of one piece of a prompt."""
        if self.pieces is not None:
            return self.pieces.longest
        return self.rule.maximum if self.rule else self.context.n_rows

    def reads_at_once(self, rows: int) -> bool:
        """Whether this many tokens of a prompt are certain to be read in one pass."""
        return self._next_piece(rows)[0] == rows and (self.pieces is None or self.pieces.is_proven(rows))

    def _next_piece(self, missing: int) -> tuple[int, int]:
        """Tokens of the next piece of a prompt, and the rows they are padded to."""
        if self.pieces is not None:
            return self.pieces.next(missing)
        tokens = min(missing, self.prompt_rows)
        return tokens, self._padded(tokens)

    def _read(self, cached: CachedText, piece: Sequence[int], rows: int) -> None:
        """Decode the next tokens of a prompt in one pass of this many rows."""
        cache = cached.cache
        start = cache.length
        cache.append(Batch.run(piece, start, cache.open_paths), rows)
        cached.tokens.extend(piece)
        self._show(cached, start, slice(len(piece)))

    def _try_long(
        self, cached: CachedText, piece: Sequence[int], rows: int, pieces: PrefillChunks, rule: RowRule
    ) -> None:
        """Read a piece in short pieces and then as a whole, and record whether both gave the same bits."""
        cache = cached.cache
        start = cache.length
        for at in range(0, len(piece), rule.maximum):
            short = piece[at : at + rule.maximum]
            self._read(cached, short, rule.padded(len(short)))
        expected = cache.save(start, cache.length)
        cached.rewind(start)
        self._read(cached, piece, rows)
        same = bytes(cache.save(start, cache.length)) == bytes(expected)
        pieces.found(rows, same)
        if not same:
            cached.rewind(start)
            cache.restore(expected, len(piece))
            cached.tokens.extend(piece)

    def recall(
        self, tokens: Sequence[int], cached: CachedText | None = None, stores: Sequence[StateStore] = ()
    ) -> int:
        """Make the cache hold as long a prefix of `tokens` as possible without a pass.

        Args:
            cached: the text that shall hold it; None for the target's own.
            stores: where else to look for saved states.

        Returns:
            How many tokens it now holds.
        """
        cached = cached or self.own
        self._begin()
        cached.rewind(common_prefix(cached.tokens, tokens))
        for store in [*self.stores, *stores]:
            cached.tokens[:] = tokens[: store.restore(cached.cache, tokens)]
        self._changing = False
        return cached.cache.length

    def save_text(self, store: StateStore, cached: CachedText) -> None:
        """Write the state of a whole text to a store."""
        self._begin()
        store.keep(cached.cache, cached.tokens, tail=True)
        self._changing = False

    def keep(self, store: StateStore, text: Sequence[int]) -> int:
        """Make a store hold the state of as much of a text as is in the cache, and of no other text.

        Args:
            text: the target's own.

        Returns:
            How many tokens that is. 0 if the cache holds nothing of the text, or if a recurrent state has
            already moved past it; the store is then left unchanged.
        """
        self._begin()
        held = self.own.tokens
        known = common_prefix(held, text)
        if not self.cache.saves_parts and known < self.cache.length:
            known = 0
        if known or not text:
            store.keep(self.cache, held[:known], tail=True)
            store.prune(held[:known], parts=self.cache.saves_parts)
        self._changing = False
        return known

    def verify(
        self,
        trees: Sequence[TextTree],
        chunks: Sequence[PromptChunk] = (),
        meanwhile: Meanwhile | None = None,
    ) -> TargetPass:
        """One pass over trees, each after its text, and over chunks of prompts.

        Args:
            trees: one for each of different texts. The cache must hold each text except its last token.
            chunks: of other texts that are still being read; they are in the cache afterwards.
            meanwhile: what the pass does while it waits for weights.

        Raises:
            DecodeAborted: stopped from outside; the cached texts are unchanged.
        """
        self._begin()
        waited, experts = self.context.waited_s, self.model.weights.expert_use
        nodes = [len(text_tree.tree) for text_tree in trees]
        total = sum(nodes) + sum(len(chunk.tokens) for chunk in chunks)
        rows = self._padded(total)
        # llama.cpp computes the end of the last layer only for the rows that want logits, and their number
        # must not choose the kernels there either. Padding wants them if any row does; so must some of the
        # prompts' rows.
        wanted = sum(nodes) + rows - total
        extra = unread = self._padded(wanted) - wanted if trees else 0
        parts: list[tuple[TextCache, Batch]] = []
        # The cells must be taken in the order in which they are committed: the chunks' now, the trees' later.
        for chunk in chunks:
            cache = chunk.cached.cache
            batch = Batch.run(chunk.tokens, cache.length, cache.open_paths)
            batch.wants_logits[:unread] = True
            unread = max(unread - len(batch), 0)
            parts.append((cache, batch))
        for text_tree in trees:
            cache = (text_tree.cached or self.own).cache
            cache.open(len(text_tree.tree.leaves))
            parts.append((cache, tree_batch(text_tree.tree, cache.length)))
        self.model.weights.use_waits(meanwhile)
        try:
            decode_together(parts, rows, certain=1)
        finally:
            self.model.weights.use_waits(None)
        row = 0
        for chunk in chunks:
            start, end = chunk.cached.cache.length, row + len(chunk.tokens)
            chunk.cached.cache.appended(len(chunk.tokens))
            chunk.cached.tokens.extend(chunk.tokens)
            self._show(chunk.cached, start, slice(row, end))
            row = end
        self._tree_rows = [row + sum(nodes[:index]) for index in range(len(trees))]
        verified: list[Verified] = []
        if trees:
            logits = self.context.logits()[extra:]
            for end, n in zip(accumulate(nodes), nodes, strict=True):
                verified.append(Verified(logits[end - n : end]))
        self._guessing = bool(trees)
        self._changing = False
        now = self.model.weights.expert_use
        used = now - experts if now is not None and experts is not None else None
        return TargetPass(tuple(verified), self.context.waited_s - waited, used)

    def commit(self, trees: Sequence[TextTree], paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of the trees that were verified last, and discard the others.

        Args:
            paths: for each tree, its accepted nodes from the root on; none of a tree that failed.
        """
        self._changing = True
        for text_tree, path, row in zip(trees, paths, self._tree_rows, strict=True):
            tree, cached = text_tree.tree, text_tree.cached or self.own
            start = cached.cache.length
            numbers, offsets = tree.sequences
            leaf = int(numbers[offsets[path[-1]]]) if path else 0
            accepted = [int(tree.tokens[node]) for node in path]
            cached.cache.commit(leaf, len(path), used_paths=len(tree.leaves), n_rows=len(tree))
            cached.tokens.extend(accepted)
            if path:
                self._show(cached, start, [row + node for node in path])
        self._guessing = self._changing = False

    def rewind(self, length: int) -> None:
        """Forget the target's own text from `length` on."""
        self._begin()
        self.own.rewind(length)
        self._changing = False

    def settle(self, length: int, cached: CachedText | None = None) -> None:
        """End an answer: forget what plain decoding would not have read by its end."""
        cached = cached or self.own
        self._begin()
        cached.cache.settle(length)
        del cached.tokens[cached.cache.length :]
        self._changing = False

    def _begin(self) -> None:
        """Begin a call that changes the cache, and discard what an interrupted one left behind."""
        if self._changing or self._guessing:
            self._recover()
        self._changing = True

    def _recover(self) -> None:
        """Reset cache and tokens to what both are known to hold."""
        self._changing = True  # in case this is interrupted too
        close_all_but([cached.cache for cached in self._texts])
        self.cache.recover()
        for cached in self._texts:
            cached.rewind(len(cached.tokens))
        self._changing = self._guessing = False

    def _padded(self, rows: int) -> int:
        return self.rule.padded(rows) if self.rule else rows

    @property
    def n_free_leaves(self) -> int:
        """Leaves that trees of all texts together may have beyond one for each."""
        return self.cache.n_free_ids

    @property
    def n_live(self) -> int:
        """Cells that texts hold."""
        return self.cache.n_live

    @property
    def closed(self) -> bool:
        """Whether the context was freed."""
        return self.context.closed

    def close(self) -> None:
        """Free the context and the weights."""
        self.context.close()
        self.model.close()


def tree_batch(tree: TokenTree, start: int) -> Batch:
    """The rows that decode a tree with its root at position `start`, with logits for every node."""
    numbers, offsets = tree.sequences
    return Batch(
        tokens=tree.tokens,
        positions=tree.depths + start,
        sequence_ids=numbers,
        offsets=offsets,
        wants_logits=np.ones(len(tree), dtype=np.bool_),
    )
