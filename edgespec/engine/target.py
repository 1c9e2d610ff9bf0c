"""The target: reads prompts, verifies a whole token tree per pass, and keeps what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from edgespec.engine.cached_sequences import CachedSequences
from edgespec.engine.embedded_images import decode_image, decode_with_text, tokens_with_images
from edgespec.engine.hidden_states import HiddenFeed, HiddenReader, HiddenStates
from edgespec.engine.sequence import PromptChunk, SequenceTree, TextSequence
from edgespec.generation.expert_use import ExpertUse
from edgespec.llama.cache.kv_cache import KVCache, decode_together, open_cache, placement
from edgespec.llama.cache.state_cache import same_states
from edgespec.llama.output_pieces import OutputPieces, UnknownEnd, row_bytes, supports
from edgespec.llama.prefill_chunks import PrefillChunks
from edgespec.llama.row_rule import ANY_ROWS, RowRule
from edgespec.llama.runtime.batch import IntArray, TokenBatch, TokenRows, tree_batch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.speculation.tree import FloatArray

_MAX_SCORED_BYTES = 64 << 20  # of the copies from which the end of a pass is computed in pieces


@dataclass(frozen=True)
class TargetPass:
    # for each tree, in the given order, (nodes, n_vocab) logits after each node; views, valid until the next
    # pass.
    logits: tuple[FloatArray, ...]
    waited_s: float  # seconds that the pass waited for streamed weights
    experts: ExpertUse | None = None  # what it needed of those that are streamed one by one; None if none are
    setup_s: float = 0.0  # seconds of the pass for what is needed once for its number of rows


class Target(CachedSequences):
    """Verifies trees of one or more sequences in one pass, and keeps the accepted paths in its cache.

    Attributes:
        rule: the row rule in force; None lets the number of rows choose the kernels.
        max_nodes: most rows of a pass in which logits are wanted.
        recalled: tokens of the last sequence that `prefill` did not have to read.
        pieces: under a row rule with a maximum, the longer pieces that prompts may be read in; None allows
            none.
    """

    def __init__(self, model: Model, context: Context, rule: RowRule | None) -> None:
        super().__init__(open_cache(context, ordered=rule is not None))
        self.model = model
        self.context = context
        self.rule = rule
        most = min(context.n_rows, context.n_outputs)
        self.max_nodes = min(most, rule.maximum) if rule else most
        self.pieces: PrefillChunks | None = None
        self.recalled = 0
        self._ends_in_pieces = supports(context)
        self._tree_rows: list[IntArray] = []  # the rows of each tree's nodes in the last pass
        self._hidden = HiddenFeed()

    def show_hidden(self, states: HiddenStates, reader: HiddenReader) -> None:
        """Give a reader the hidden states of every token that joins a sequence from now on."""
        self._hidden.connect(states, reader)

    def prefill(
        self,
        sequence: TextSequence,
        length: int | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        max_unread: int = 0,
    ) -> int:
        """Make a sequence the target's own, and read it, reusing what the cache already has of it.

        Args:
            length: tokens to read; None for all but the last, the root of the first tree.
            on_progress: called with the tokens read and to be read.
            max_unread: tokens at the end that may be left to the pass of the first tree, if one more pass
                would read them.

        Returns:
            How many tokens are left.

        Raises:
            DecodeAborted: stopped from outside; what was read until then is kept, except by models with a
                recurrent state.
        """
        length = len(sequence.tokens) - 1 if length is None else length
        self.recalled = 0
        self.recalled = self.recall(sequence, length)
        missing = length - self.recalled
        read = 0
        while read < missing:
            left = missing - read
            has_images = sequence.next_image(sequence.n_cached) is not None
            is_last = not has_images and self._next_piece(left)[0] == left
            leaves = is_last and left <= max_unread
            if on_progress is not None and read == 0 and (leaves or not is_last):
                on_progress(0, missing)
            if leaves:
                return left
            read += self.read_chunk(sequence, length)
            self._store_blocks(sequence)
            if on_progress is not None:
                on_progress(read, missing)
        return 0

    @property
    def max_unread(self) -> int:
        """Tokens of a prompt that a tree's pass may read, which saves reading the weights once more.

        Where these are in memory, it is fewer than a tree may have nodes: costs are known for such passes.
        Where the number of rows chooses the kernels, or a rule pads passes, a prompt has passes of its own,
        and so it has with a running state.
        """
        if self.model.keeps_recurrent_state or self.rule != ANY_ROWS:
            return 0
        most = self.context.n_rows if self.model.weights.streamed_bytes else self.max_nodes
        return min(self.rule.maximum, most) - 1

    def read_chunk(
        self, sequence: TextSequence, length: int | None = None, *, image_rows: int | None = None
    ) -> int:
        """Read the next tokens of a sequence, in as large a chunk as possible.

        Under a row rule, prompts too are read in chunks that it allows. A token's keys and values then do not
        depend on how the text was split into passes, so a reused cache gives the same text as an
        empty one. Chunks beyond the rule's maximum are used only where they have been shown to give the same
        bits. Of tokens that are scored, only as many are read as the logits have room for.

        Args:
            length: tokens that the cache is to hold in the end; None for all but the last.
            image_rows: most rows to read where an image is among them; None for whole images.

        Returns:
            How many tokens were read.

        Raises:
            DecodeAborted: as `prefill`.
        """
        length = len(sequence.tokens) - 1 if length is None else length
        try:
            return self._read_next(sequence, length, image_rows)
        except UnknownEnd:
            self._ends_in_pieces = False
            return self._read_next(sequence, length, image_rows)

    def _read_next(self, sequence: TextSequence, length: int, image_rows: int | None) -> int:
        self._begin()
        start = sequence.n_cached
        missing = length - start
        if sequence.scores is not None:
            missing = min(missing, max(sequence.scores.covered - start, 0) + self.max_scored)
        if together := self.readable_together(sequence, length):
            assert self._token_rows is not None
            together = min(together, image_rows or together)
            decode_with_text(sequence, together, self._token_rows, self.prompt_rows)
            self._changing = False
            return together
        image = sequence.next_image(start)
        if image is not None and image.start <= start:
            n_rows = decode_image(self.context, sequence.kv_cache, image, image_rows)
            self._changing = False
            return n_rows
        if image is not None:
            missing = min(missing, image.start - start)
        n_tokens, rows = self._next_piece(missing)
        if self.pieces is None or self.pieces.is_proven(rows):
            self._read(PromptChunk.next_of(sequence, n_tokens), rows)
        else:
            self._try_long(sequence, n_tokens, rows, self.pieces)
        self._changing = False
        self._hidden.digest()
        return n_tokens

    def readable_together(self, sequence: TextSequence, length: int | None = None) -> int:
        """Count the next tokens that are read together because there is an image among them.

        That saves reading the weights once for each image, and once for each text between images.

        Args:
            length: as `read_chunk`.
        """
        length = len(sequence.tokens) - 1 if length is None else length
        saves_reading = self.max_unread and self.model.weights.streamed_bytes
        if not sequence.images or sequence.scores is not None or not saves_reading or self.context.adapted:
            return 0
        together = tokens_with_images(sequence, length, self.prompt_rows)
        return together if together and self._token_rows is not None else 0

    def divides_images(self, sequence: TextSequence) -> bool:
        """True if the images of a sequence may be read in parts of any size, with passes of others between.

        Where rows of an image see those behind them, they must share a pass. And a row rule that chooses
        kernels by the number of rows wants the same parts every time.
        """
        free = self.rule is None or self.rule == ANY_ROWS
        return free and all(image.rows.causal for image in sequence.images)

    @cached_property
    def _token_rows(self) -> TokenRows | None:
        """The embeddings of tokens; None if the model's graph uses more of a token."""
        return TokenRows.of(self.model)

    @property
    def max_scored(self) -> int:
        """The maximum number of rows whose logits a pass over a single prompt can give."""
        if not self._ends_in_pieces:
            return self.max_nodes
        return max(_MAX_SCORED_BYTES // row_bytes(self.context), self.max_nodes)

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
        return not self.pieces.is_proven(self._next_piece(missing)[1])

    def shared_rows(self, wanted: int) -> int:
        """The largest number of rows, up to the wanted one, of a pass that sequences share."""
        if self.pieces is not None:
            return self.pieces.proven(wanted)
        return min(wanted, self.prompt_rows)

    def _next_piece(self, missing: int) -> tuple[int, int]:
        """Tokens of the next piece of a prompt, and the rows they are padded to."""
        if self.pieces is not None:
            return self.pieces.next(missing, self.context.n_cells - self.cache.n_live)
        tokens = min(missing, self.prompt_rows)
        return tokens, self._padded(tokens)

    def _read(self, chunk: PromptChunk, rows: int) -> None:
        """Decode the next tokens of a prompt in one pass of this many rows, and score them if wanted."""
        cache, scored, size = chunk.sequence.kv_cache, chunk.scored, len(chunk.tokens)
        batch = TokenBatch.run(chunk.tokens, chunk.start, cache.open_paths)
        if len(scored) > self.max_nodes:
            self._read_in_pieces(chunk, batch, rows)
            return
        if scored:
            # As in `verify`, a number of rows that the rule allows must want logits.
            wanted = self._padded(len(scored))
            first = max(min(scored.start, size - wanted), 0)
            batch.wants_logits[first : first + wanted] = True
            batch = replace(batch, padding_wants_logits=wanted > size)
        cache.append(batch, rows)
        if scored:
            logits = self.context.logits()
            chunk.score(scored.start, logits[scored.start - first : scored.stop - first])
        self._hidden.show(chunk.sequence, chunk.start, slice(size))

    def _read_in_pieces(self, chunk: PromptChunk, batch: TokenBatch, rows: int) -> None:
        """Decode and score more tokens of a prompt than there is room for logits."""
        cache, scored = chunk.sequence.kv_cache, chunk.scored
        batch.wants_logits[scored.start : scored.start + self.max_nodes] = True
        pieces = OutputPieces(
            self.context,
            n_rows=max(rows, len(batch)) if cache.ordered else len(batch),
            n_outputs=self.max_nodes,
            wanted=np.arange(scored.start, scored.stop, dtype=np.int32),
            receive=lambda first, logits: chunk.score(scored.start + first, logits),
        )
        with pieces.observing():
            cache.append(replace(batch, padding_wants_logits=False), rows)
        self._hidden.show(chunk.sequence, chunk.start, slice(len(batch)))

    def _try_long(self, sequence: TextSequence, n_tokens: int, rows: int, pieces: PrefillChunks) -> None:
        """Read a piece in proven pieces and then as a whole, and record whether both gave the same bits."""
        cache = sequence.kv_cache
        start = cache.length
        # A running state has no parts: the whole sequence is saved and restored.
        first = start if cache.saves_parts else 0
        before = cache.save(0, start) if start > first else None
        at = 0
        while at < n_tokens:
            size = pieces.proven(n_tokens - at)
            self._read(PromptChunk.next_of(sequence, size), pieces.padded(size))
            at += size
        length = cache.length
        expected = cache.save(first, length)
        sequence.rewind(start)
        if before is not None:
            cache.restore(before, start)
        self._read(PromptChunk.next_of(sequence, n_tokens), rows)
        same = same_states(cache.save(first, cache.length), expected, cache.length)
        pieces.found(rows, same)
        if not same:
            sequence.rewind(first)
            cache.restore(expected, length - first)

    def verify(self, trees: Sequence[SequenceTree], chunks: Sequence[PromptChunk] = ()) -> TargetPass:
        """Run a pass over trees, each after its sequence, and over chunks of prompts.

        Args:
            trees: one for each of different sequences. The cache must hold each sequence except its last
                token, and what is unread of it if there is only one tree, and `max_unread` allows it.
            chunks: of other sequences that are still being read; they are in the cache afterwards.

        Raises:
            DecodeAborted: stopped from outside; the cached sequences are unchanged.
        """
        self._begin()
        waited, experts = self.context.waited_s, self.model.weights.expert_use
        setup = self.context.setup_s
        nodes = [len(drafted.tree) for drafted in trees]
        pending = sum(drafted.sequence.kv_cache.n_pending for drafted in trees)
        n_unread = sum(drafted.sequence.unread for drafted in trees)
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
            cache = chunk.sequence.kv_cache
            batch = TokenBatch.run(chunk.tokens, chunk.start, cache.open_paths)
            wants = batch.wants_logits
            wants[rows_scored.start : rows_scored.stop] = True
            others = np.flatnonzero(~wants)[:more]
            wants[others] = True
            more -= len(others)
            extra += batch.n_outputs
            parts.append((cache, batch))
        unread = [PromptChunk.next_of(drafted.sequence, n_unread) for drafted in trees if n_unread]
        for drafted in trees:
            cache = drafted.sequence.kv_cache
            cache.open(len(drafted.tree.leaves))
            batch = tree_batch(drafted.tree, cache.length + n_unread)
            if n_unread:
                before = TokenBatch.run(unread[0].tokens, unread[0].start, cache.open_paths)
                batch = TokenBatch.joined([before, batch])
            parts.append((cache, batch))
        decode_together(parts, rows, certain=n_unread + 1)
        if any(scored):
            at, logits = 0, self.context.logits()
            for chunk, rows_scored, (_, batch) in zip(chunks, scored, parts, strict=False):
                if rows_scored:
                    first = at + np.count_nonzero(batch.wants_logits[: rows_scored.start])
                    chunk.score(rows_scored.start, logits[first : first + len(rows_scored)])
                at += batch.n_outputs
        row = 0
        for chunk in [*chunks, *unread]:
            end = row + len(chunk.tokens)
            chunk.sequence.kv_cache.appended(len(chunk.tokens))
            self._hidden.show(chunk.sequence, chunk.start, slice(row, end))
            row = end
        verified: list[FloatArray] = []
        self._tree_rows = []
        if trees:
            logits = self.context.logits()[extra:]
            for end, n, drafted in zip(accumulate(nodes), nodes, trees, strict=True):
                placed = placement(drafted.sequence.kv_cache)
                if placed is None:
                    self._tree_rows.append(np.arange(row + end - n, row + end, dtype=np.int32))
                    verified.append(logits[end - n : end])
                else:
                    self._tree_rows.append(placed.rows)
                    verified.append(placed.select(logits))
        self._guessing = bool(trees)
        self._changing = False
        now = self.model.weights.expert_use
        used = now - experts if now is not None and experts is not None else None
        return TargetPass(tuple(verified), self.context.waited_s - waited, used, self.context.setup_s - setup)

    def commit(self, trees: Sequence[SequenceTree], paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of the trees that were verified last, and discard the others.

        Args:
            paths: for each tree, its accepted nodes from the root on, whose tokens its sequence has by now;
                none of a tree that failed.
        """
        self._changing = True
        for drafted, path, rows in zip(trees, paths, self._tree_rows, strict=True):
            sequence, tree, cache = drafted.sequence, drafted.tree, drafted.sequence.kv_cache
            start = cache.length
            numbers, offsets = tree.sequences
            leaf = int(numbers[offsets[path[-1]]]) if path else 0
            cache.commit(leaf, len(path), used_paths=len(tree.leaves), n_rows=len(tree))
            if path:
                self._hidden.show(sequence, start, rows[list(path)].tolist())
            if sequence.unread:
                sequence.unread = 0
                self._store_blocks(sequence)
        self._guessing = self._changing = False

    def close_sequence(self, sequence: TextSequence) -> None:
        is_own = sequence is self.own
        super().close_sequence(sequence)
        if not is_own:
            self._hidden.closed(sequence)

    def _padded(self, rows: int) -> int:
        if self.pieces is not None:
            return self.pieces.padded(rows)
        return self.rule.padded(rows) if self.rule else rows

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
