"""The target: reads prompts, verifies a whole token tree per pass, and keeps what was accepted.

Its cache holds one sequence or several: they are opened and closed, saved to disk and restored, and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from edgespec.engine.hidden_states import HiddenFeed, HiddenReader, HiddenStates
from edgespec.engine.passes import CachedSequence, PromptChunk, SequenceTree, TargetPass, VerifiedTree
from edgespec.engine.scoring import PromptScores
from edgespec.files.checked import CheckedFiles
from edgespec.llama.cache.kv_cache import (
    KVCache,
    close_all_but,
    common_prefix,
    decode_together,
    inherit,
    open_beside,
    open_cache,
    placement,
)
from edgespec.llama.cache.state_cache import same_states
from edgespec.llama.cache.state_file import StateFile
from edgespec.llama.cache.states import SavedState, StateStore
from edgespec.llama.cache.tree_rows import tree_batch
from edgespec.llama.output_pieces import OutputPieces, UnknownEnd, row_bytes, supports
from edgespec.llama.prefill_chunks import PrefillChunks
from edgespec.llama.row_rule import ANY_ROWS, RowRule
from edgespec.llama.runtime.batch import IntArray, TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model

_MOST_SCORED_BYTES = 64 << 20  # of the copies from which the end of a pass is computed in pieces


class Target:
    """Verifies trees of one or more sequences in one pass, and keeps the accepted paths in its cache.

    Every call is atomic as far as later calls can tell: whatever it raises and wherever it is interrupted,
    the next call first discards what it left in the cache. The cached sequences may then be shorter than
    before, and the missing parts are read again; they are never different sequences.

    There is always one sequence, the target's own, for callers that have a single one. Others are opened
    beside it, and share its cells.

    Attributes:
        rule: the row rule in force; None lets the number of rows choose the kernels.
        max_nodes: most rows of a pass in which logits are wanted.
        max_leaves: most leaves of a tree.
        max_sequences: most sequences in the cache.
        recalled: tokens of the last prompt that `prefill` did not have to read.
        pieces: under a row rule with a maximum, the longer pieces that prompts may be read in; None allows
            none.
        identity: everything that the contents of the cache depend on, except the tokens.
        stores: where the states of all sequences are kept on disk.
    """

    def __init__(self, model: Model, context: Context, rule: RowRule | None) -> None:
        self.model = model
        self.context = context
        self.rule = rule
        self.own = CachedSequence(open_cache(context, ordered=rule is not None))
        most = min(context.n_rows, context.n_outputs)
        self.max_nodes = min(most, rule.maximum) if rule else most
        self.max_leaves = self.cache.max_paths
        # Saving a sequence's state takes an id of its own; a running state is that of one sequence.
        self.max_sequences = max(self.max_leaves - 1, 1) if self.cache.saves_parts else 1
        self.pieces: PrefillChunks | None = None
        self.recalled = 0
        self._ends_in_pieces = supports(context)
        self.identity: dict[str, str] = {}
        self.stores: list[StateStore] = []
        self._sequences = [self.own]
        self._tree_rows: list[IntArray] = []  # the rows of each tree's nodes in the last pass
        self._hidden = HiddenFeed()
        self._changing = False  # a call has begun and not ended
        self._guessing = False  # trees were verified, but nothing of them is committed yet

    def show_hidden(self, states: HiddenStates, reader: HiddenReader) -> None:
        """Give a reader the hidden states of every token that joins a sequence from now on."""
        self._hidden.connect(states, reader)

    def prefill(
        self,
        tokens: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
        *,
        most_unread: int = 0,
        store: StateStore | None = None,
    ) -> int:
        """Make the target's own sequence exactly `tokens`, reusing what the cache already has of them.

        Args:
            on_progress: called with the tokens read and to be read.
            most_unread: tokens at the end that may be left to the pass of the first tree, if one more pass
                would read them.
            store: where the state of this sequence alone is kept.

        Returns:
            How many tokens are left.

        Raises:
            DecodeAborted: stopped from outside; what was read until then is kept, except by models with a
                recurrent state.
        """
        self.recalled = 0
        self.recalled = self.recall(tokens, store=store)
        missing = len(tokens) - self.recalled
        read = 0
        while read < missing:
            left = missing - read
            is_last = self._next_piece(left)[0] == left
            leaves = is_last and left <= most_unread
            if on_progress is not None and read == 0 and (leaves or not is_last):
                on_progress(0, missing)
            if leaves:
                return left
            read += self.read_chunk(tokens, self.own)
            self._store_blocks(self.own, store)
            if on_progress is not None:
                on_progress(read, missing)
        return 0

    @property
    def most_unread(self) -> int:
        """Tokens of a prompt that a tree's pass may read: where it saves reading the weights once more.

        Where the number of rows chooses the kernels, or a rule pads passes, a prompt has passes of its own,
        and so it has with a running state.
        """
        streamed = self.model.weights.streamed_bytes > 0 and not self.model.keeps_recurrent_state
        if not streamed or self.rule != ANY_ROWS:
            return 0
        return min(self.rule.maximum, self.context.n_rows) - 1

    def read_chunk(self, tokens: Sequence[int], cached: CachedSequence) -> int:
        """Read the next tokens of a sequence whose beginning is cached, in as large a chunk as possible.

        Under a row rule, prompts too are read in chunks that it allows. A token's keys and values then do not
        depend on how the text was split into passes, so a reused cache gives the same text as an
        empty one. Chunks beyond the rule's maximum are used only where they have been shown to give the same
        bits. Of tokens that are scored, only as many are read as the logits have room for.

        Returns:
            How many tokens were read.

        Raises:
            DecodeAborted: as `prefill`.
        """
        try:
            return self._read_next(tokens, cached)
        except UnknownEnd:
            self._ends_in_pieces = False
            return self._read_next(tokens, cached)

    def _read_next(self, tokens: Sequence[int], cached: CachedSequence) -> int:
        self._begin()
        start = cached.cache.length
        missing = len(tokens) - start
        if cached.scores is not None:
            missing = min(missing, max(cached.scores.covered - start, 0) + self.most_scored)
        n_tokens, rows = self._next_piece(missing)
        piece = tokens[start : start + n_tokens]
        if self.pieces is None or self.pieces.is_proven(rows):
            self._read(cached, piece, rows)
        else:
            self._try_long(cached, piece, rows, self.pieces)
        self._changing = False
        self._hidden.digest()
        return n_tokens

    @property
    def most_scored(self) -> int:
        """The maximum number of rows whose logits a pass over a single prompt can give."""
        if not self._ends_in_pieces:
            return self.max_nodes
        return max(_MOST_SCORED_BYTES // row_bytes(self.context), self.max_nodes)

    @property
    def prompt_rows(self) -> int:
        """The maximum number of rows in a prefill chunk."""
        if self.pieces is not None:
            return self.pieces.longest
        most = self.context.n_rows
        return min(self.rule.maximum, most) if self.rule else most

    def reads_at_once(self, rows: int) -> bool:
        """True if this many tokens of a prompt are certain to be read in one pass."""
        return self._next_piece(rows)[0] == rows and (self.pieces is None or self.pieces.is_proven(rows))

    def must_try(self, missing: int) -> bool:
        """True if the next piece of a prompt shows whether pieces of its length are exact."""
        if self.pieces is None:
            return False
        return not self.pieces.is_proven(self.pieces.next(missing)[1])

    def shared_rows(self, wanted: int) -> int:
        """The largest number of rows, up to the wanted one, of a pass that sequences share."""
        if self.pieces is not None:
            return self.pieces.proven(wanted)
        return min(wanted, self.prompt_rows)

    def _next_piece(self, missing: int) -> tuple[int, int]:
        """Tokens of the next piece of a prompt, and the rows they are padded to."""
        if self.pieces is not None:
            return self.pieces.next(missing)
        tokens = min(missing, self.prompt_rows)
        return tokens, self._padded(tokens)

    def _read(self, cached: CachedSequence, piece: Sequence[int], rows: int) -> None:
        """Decode the next tokens of a prompt in one pass of this many rows, and score them if wanted."""
        cache, chunk = cached.cache, PromptChunk(cached, piece)
        start, scored = cache.length, chunk.scored
        batch = TokenBatch.run(piece, start, cache.open_paths)
        if len(scored) > self.max_nodes:
            self._read_in_pieces(chunk, batch, rows)
            return
        if scored:
            # As in `verify`, a number of rows that the rule allows must want logits.
            wanted = self._padded(len(scored))
            first = max(min(scored.start, len(piece) - wanted), 0)
            batch.wants_logits[first : first + wanted] = True
            batch = replace(batch, padding_wants_logits=wanted > len(piece))
        cache.append(batch, rows)
        if scored:
            logits = self.context.logits()
            chunk.score(start + scored.start, logits[scored.start - first : scored.stop - first])
        cached.tokens.extend(piece)
        self._hidden.show(cached, start, slice(len(piece)))

    def _read_in_pieces(self, chunk: PromptChunk, batch: TokenBatch, rows: int) -> None:
        """Decode and score more tokens of a prompt than there is room for logits."""
        cached, scored = chunk.cached, chunk.scored
        start = cached.cache.length
        batch.wants_logits[scored.start : scored.start + self.max_nodes] = True
        pieces = OutputPieces(
            self.context,
            n_rows=max(rows, len(batch)) if cached.cache.ordered else len(batch),
            n_outputs=self.max_nodes,
            wanted=np.arange(scored.start, scored.stop, dtype=np.int32),
            receive=lambda first, logits: chunk.score(start + scored.start + first, logits),
        )
        with pieces.observing():
            cached.cache.append(replace(batch, padding_wants_logits=False), rows)
        cached.tokens.extend(chunk.tokens)
        self._hidden.show(cached, start, slice(len(batch)))

    def _try_long(
        self, cached: CachedSequence, piece: Sequence[int], rows: int, pieces: PrefillChunks
    ) -> None:
        """Read a piece in proven pieces and then as a whole, and record whether both gave the same bits."""
        cache = cached.cache
        start = cache.length
        # A running state has no parts: the whole sequence is saved and restored.
        first = start if cache.saves_parts else 0
        before = cache.save(0, start) if start > first else None
        at = 0
        while at < len(piece):
            size = pieces.proven(len(piece) - at)
            self._read(cached, piece[at : at + size], pieces.padded(size))
            at += size
        expected = cache.save(first, cache.length)
        held = list(cached.tokens)
        cached.rewind(start)
        if before is not None:
            cache.restore(before, start)
            cached.tokens[:] = held[:start]
        self._read(cached, piece, rows)
        same = same_states(cache.save(first, cache.length), expected, cache.length)
        pieces.found(rows, same)
        if not same:
            cached.rewind(first)
            cache.restore(expected, len(held) - first)
            cached.tokens[:] = held

    def verify(self, trees: Sequence[SequenceTree], chunks: Sequence[PromptChunk] = ()) -> TargetPass:
        """Run a pass over trees, each after its sequence, and over chunks of prompts.

        Args:
            trees: one for each of different sequences. The cache must hold each sequence except its last
                token, and what is unread of it if there is only one tree, and `most_unread` allows it.
            chunks: of other sequences that are still being read; they are in the cache afterwards.

        Raises:
            DecodeAborted: stopped from outside; the cached sequences are unchanged.
        """
        self._begin()
        waited, experts = self.context.waited_s, self.model.weights.expert_use
        setup = self.context.setup_s
        nodes = [len(sequence_tree.tree) for sequence_tree in trees]
        pending = sum((sequence_tree.cached or self.own).cache.n_pending for sequence_tree in trees)
        n_unread = sum(sequence_tree.unread for sequence_tree in trees)
        assert not n_unread or (len(trees) == 1 and not chunks)
        total = pending + n_unread + sum(nodes) + sum(len(chunk.tokens) for chunk in chunks)
        rows = self._padded(total)
        # llama.cpp computes the end of the last layer only for the rows that want logits, and their number
        # must not choose the kernels there either. Padding wants them if any row does; so must some of the
        # prompts' rows.
        scored = [chunk.scored for chunk in chunks]
        wanted = pending + sum(nodes) + sum(map(len, scored)) + rows - total
        more = self._padded(wanted) - wanted if trees or any(scored) else 0
        extra = 0  # rows before those of trees that want logits
        parts: list[tuple[KVCache, TokenBatch]] = []
        # The cells must be taken in the order in which they are committed: the chunks' now, the trees' later.
        for chunk, rows_scored in zip(chunks, scored, strict=True):
            cache = chunk.cached.cache
            batch = TokenBatch.run(chunk.tokens, cache.length, cache.open_paths)
            wants = batch.wants_logits
            wants[rows_scored.start : rows_scored.stop] = True
            others = np.flatnonzero(~wants)[:more]
            wants[others] = True
            more -= len(others)
            extra += batch.n_outputs
            parts.append((cache, batch))
        for sequence_tree in trees:
            cache = (sequence_tree.cached or self.own).cache
            cache.open(len(sequence_tree.tree.leaves))
            batch = tree_batch(sequence_tree.tree, cache.length + n_unread)
            if n_unread:
                before = TokenBatch.run(
                    sequence_tree.tokens[-1 - n_unread : -1], cache.length, cache.open_paths
                )
                batch = TokenBatch.joined([before, batch])
            parts.append((cache, batch))
        decode_together(parts, rows, certain=n_unread + 1)
        if any(scored):
            at, logits = 0, self.context.logits()
            for chunk, rows_scored, (cache, batch) in zip(chunks, scored, parts, strict=False):
                if rows_scored:
                    first = at + np.count_nonzero(batch.wants_logits[: rows_scored.start])
                    chunk.score(cache.length + rows_scored.start, logits[first : first + len(rows_scored)])
                at += batch.n_outputs
        row = 0
        read = [(chunk.cached, chunk.tokens) for chunk in chunks]
        if n_unread:
            read.append((trees[0].cached or self.own, trees[0].tokens[-1 - n_unread : -1]))
        for cached, tokens in read:
            start, end = cached.cache.length, row + len(tokens)
            cached.cache.appended(len(tokens))
            cached.tokens.extend(tokens)
            self._hidden.show(cached, start, slice(row, end))
            row = end
        verified: list[VerifiedTree] = []
        self._tree_rows = []
        if trees:
            logits = self.context.logits()[extra:]
            for end, n, sequence_tree in zip(accumulate(nodes), nodes, trees, strict=True):
                placed = placement((sequence_tree.cached or self.own).cache)
                if placed is None:
                    self._tree_rows.append(np.arange(row + end - n, row + end, dtype=np.int32))
                    verified.append(VerifiedTree(logits[end - n : end]))
                else:
                    self._tree_rows.append(placed.rows)
                    verified.append(VerifiedTree(placed.select(logits)))
        self._guessing = bool(trees)
        self._changing = False
        now = self.model.weights.expert_use
        used = now - experts if now is not None and experts is not None else None
        return TargetPass(tuple(verified), self.context.waited_s - waited, used, self.context.setup_s - setup)

    def commit(self, trees: Sequence[SequenceTree], paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of the trees that were verified last, and discard the others.

        Args:
            paths: for each tree, its accepted nodes from the root on; none of a tree that failed.
        """
        self._changing = True
        for sequence_tree, path, rows in zip(trees, paths, self._tree_rows, strict=True):
            tree, cached = sequence_tree.tree, sequence_tree.cached or self.own
            start = cached.cache.length
            numbers, offsets = tree.sequences
            leaf = int(numbers[offsets[path[-1]]]) if path else 0
            accepted = [int(tree.tokens[node]) for node in path]
            cached.cache.commit(leaf, len(path), used_paths=len(tree.leaves), n_rows=len(tree))
            cached.tokens.extend(accepted)
            if path:
                self._hidden.show(cached, start, rows[list(path)].tolist())
            if sequence_tree.unread:
                self._store_blocks(cached, sequence_tree.store)
        self._guessing = self._changing = False

    def _padded(self, rows: int) -> int:
        if self.pieces is not None:
            return self.pieces.padded(rows)
        return self.rule.padded(rows) if self.rule else rows

    @property
    def cache(self) -> KVCache:
        """The cache of the target's own sequence."""
        return self.own.cache

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the target's own sequence whose keys and values are in the cache."""
        if self._changing:
            self._recover()
        return self.own.tokens

    @property
    def sequences(self) -> Sequence[CachedSequence]:
        """All sequences in the cache, the target's own first."""
        if self._changing:
            self._recover()
        return self._sequences

    @property
    def n_free_leaves(self) -> int:
        """Leaves that trees of all sequences together may have beyond one for each."""
        return self.cache.n_free_ids

    @property
    def n_live(self) -> int:
        """Cells that sequences hold."""
        return self.cache.n_live

    def open_sequence(self, tokens: Sequence[int], scores: PromptScores | None = None) -> CachedSequence:
        """A new sequence in the cache, which holds as much of the beginning of `tokens` as is known already.

        The cells of the longest beginning that another sequence has in common are shared. A recurrent state
        is that of a single sequence, so there this is the target's own.

        Args:
            scores: gets the log-probabilities of its tokens; None if they are not wanted.

        Raises:
            ValueError: there are `max_sequences` sequences already.
        """
        if self.max_sequences == 1:
            if scores is not None:
                scores.inherit(self.own.scores, _shared(self.own, tokens, scores))
                tokens = tokens[: scores.covered]
            self.own.scores = scores
            self.recall(tokens)
            return self.own
        self._begin()
        cached = CachedSequence(open_beside(self.cache))
        self._sequences.append(cached)
        source, shared = self.longest_prefix(tokens, but=cached, scores=scores)
        if source is not None:
            inherit(cached.cache, source.cache, shared)
            cached.tokens[:] = tokens[:shared]
            if scores is not None:
                scores.inherit(source.scores, shared)
        cached.scores = scores
        self._changing = False
        return cached

    def close_sequence(self, cached: CachedSequence) -> None:
        """Forget a sequence that was opened; the target's own stays."""
        if cached is self.own:
            return
        self._begin()
        cached.tokens.clear()
        cached.cache.close()
        self._sequences.remove(cached)
        self._changing = False
        self._hidden.closed(cached)

    def longest_prefix(
        self,
        tokens: Sequence[int],
        but: CachedSequence | None = None,
        scores: PromptScores | None = None,
    ) -> tuple[CachedSequence | None, int]:
        """The sequence in the cache with the longest beginning of `tokens`, but for one, and its length.

        Args:
            scores: of the tokens; those that are wanted must be known of the beginning.
        """
        longest: tuple[CachedSequence | None, int] = (None, 0)
        for other in self._sequences:
            length = 0 if other is but else _shared(other, tokens, scores)
            if length > longest[1]:
                longest = other, length
        return longest

    def recall(
        self, tokens: Sequence[int], cached: CachedSequence | None = None, store: SavedState | None = None
    ) -> int:
        """Make the cache hold as long a prefix of `tokens` as possible without a pass.

        Args:
            cached: the sequence that shall hold it; None for the target's own.
            store: where the state of this sequence alone was saved.

        Returns:
            How many tokens it now holds.
        """
        cached = cached or self.own
        self._begin()
        cached.rewind(common_prefix(cached.tokens, tokens))
        _drop_pending(cached)
        for place in [*self.stores, *([] if store is None else [store])]:
            cached.tokens[:] = tokens[: place.restore(cached.cache, tokens)]
        self._changing = False
        return cached.cache.length

    def set_aside(self, cached: CachedSequence, folder: Path) -> StateFile:
        """Move a sequence that was opened to a file; `recall` moves it back.

        Args:
            folder: on the disk that is to hold the file.
        """
        self._begin()
        _drop_pending(cached)
        state = StateFile(folder, cached.cache, cached.tokens)
        self._changing = False
        self.close_sequence(cached)
        return state

    def save_state(self, store: StateStore, tokens: Sequence[int]) -> int:
        """Make a store hold the state of as much of a sequence as is in the cache, and of no other sequence.

        Args:
            tokens: of the target's own sequence.

        Returns:
            How many tokens that is. 0 if the cache holds nothing of the sequence, or if a recurrent state has
            already moved past it; the store is then left unchanged.
        """
        self._begin()
        _drop_pending(self.own)
        held = self.own.tokens
        known = common_prefix(held, tokens)
        if not self.cache.saves_parts and known < self.cache.length:
            known = 0
        if known:
            store.save(self.cache, held[:known], tail=True)
            store.prune(held[:known], parts=self.cache.saves_parts)
        self._changing = False
        return known

    def store_in(self, files: CheckedFiles) -> StateStore:
        """A store of states of this target's sequences."""
        return StateStore(files, repr(sorted(self.identity.items())))

    def _store_blocks(self, cached: CachedSequence, store: StateStore | None) -> None:
        """Write the whole blocks of a sequence that are not on disk yet."""
        for place in [*self.stores, *([] if store is None else [store])]:
            place.save(cached.cache, cached.tokens, tail=False)

    def storing(self, cached: CachedSequence) -> Iterator[None]:
        """Write what is not on disk yet of a sequence to the stores, with a step for each block.

        The steps end early when the cache no longer has the sequence as it is now.
        """
        return self._storing(cached, list(cached.tokens))

    def _storing(self, cached: CachedSequence, tokens: list[int]) -> Iterator[None]:
        for store in self.stores:
            blocks = store.saving(cached.cache, tokens, tail=True)
            while cached.tokens == tokens:
                self._begin()
                wrote = next(blocks, self) is not self
                self._changing = False
                if not wrote:
                    break
                yield

    def rewind(self, length: int) -> None:
        """Forget the target's own sequence from `length` on."""
        self._begin()
        self.own.rewind(length)
        self._changing = False

    def truncate_to(self, length: int, cached: CachedSequence | None = None) -> None:
        """End an answer: forget what plain decoding would not have read by its end."""
        cached = cached or self.own
        self._begin()
        cached.cache.truncate_to(length)
        del cached.tokens[cached.cache.length :]
        self._changing = False

    @property
    def n_pending(self) -> int:
        """Rows of the next pass that tokens of its sequence take, besides the root of the tree."""
        return self.cache.n_pending

    def _begin(self) -> None:
        """Begin a call that changes the cache, and discard what an interrupted one left behind."""
        if self._changing or self._guessing:
            self._recover()
        self._changing = True

    def _recover(self) -> None:
        """Reset cache and tokens to what both are known to hold."""
        self._changing = True  # in case this is interrupted too
        close_all_but([cached.cache for cached in self._sequences])
        self.cache.recover()
        for cached in self._sequences:
            cached.rewind(len(cached.tokens))
        self._changing = self._guessing = False

    @property
    def reading_s(self) -> float:
        """Seconds so far during which weights were being read for passes."""
        return self.model.weights.reading_s

    @property
    def closed(self) -> bool:
        """True if the context was freed."""
        return self.context.closed

    def close(self) -> None:
        """Free the context and the weights."""
        self.context.close()
        self.model.close()


def _shared(other: CachedSequence, tokens: Sequence[int], scores: PromptScores | None) -> int:
    """The number of tokens at the beginning that another sequence holds, so that they need not be read."""
    held = common_prefix(other.tokens, tokens)
    return held if scores is None else scores.shareable(other.scores, held)


def _drop_pending(cached: CachedSequence) -> None:
    """Forget the tokens that only the next pass would read; they are read like any others then."""
    cached.rewind(cached.cache.length - cached.cache.n_pending)
