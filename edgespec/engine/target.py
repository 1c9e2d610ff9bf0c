"""The target: one slow model, asked about a whole token tree at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.models.llama.cache.states import StateStore
from edgespec.models.llama.cache.text_cache import common_prefix, open_cache
from edgespec.models.llama.prefill_chunks import PrefillChunks
from edgespec.models.llama.row_rule import RowRule
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context, FloatArray
from edgespec.models.llama.runtime.model import Model
from edgespec.speculation.tree import TokenTree


@dataclass(frozen=True)
class TextTree:
    """A text, and a tree of how it may go on; the root is the text's last token."""

    text: Sequence[int]
    tree: TokenTree


@dataclass(frozen=True)
class Verified:
    """What a pass says about one tree.

    Attributes:
        logits: (nodes, n_vocab) after each node; a view, valid until the next pass.
    """

    logits: FloatArray


@dataclass(frozen=True)
class TargetPass:
    """One pass of the target.

    Attributes:
        verified: for each tree, in the order in which they were given.
        waited_s: seconds that the pass waited for weights to arrive.
    """

    verified: tuple[Verified, ...]
    waited_s: float


class Target:
    """Verifies trees in one pass each, and keeps the accepted path in its cache.

    Every call is all or nothing as far as later calls can tell: whatever one raises and wherever it was
    interrupted, the next one first drops what it left in the cache. The text may then be shorter than it
    was, and is read again; it is never another.

    Attributes:
        rule: the row rule in force; None lets the row count choose the kernels.
        max_nodes: most nodes a tree may have.
        max_leaves: most leaves a tree may have.
        identity: names everything but the tokens that the bits of the cache depend on.
        stores: where states of texts are kept on disk.
        pieces: under a row rule, the longer pieces that prompts may be read in; None allows none.
    """

    def __init__(self, model: Model, context: Context, rule: RowRule | None) -> None:
        self.model = model
        self.rule = rule
        self.context = context
        self.cache = open_cache(context, ordered=rule is not None)
        most = min(context.n_rows, context.n_outputs)
        self.max_nodes = min(most, rule.maximum) if rule else most
        self.max_leaves = self.cache.max_paths
        self.identity: dict[str, str] = {}
        self.stores: list[StateStore] = []
        self.pieces: PrefillChunks | None = None
        self._tokens: list[int] = []
        self._changing = False  # a call has begun, and not come to its end
        self._guessing = False  # a tree was verified, and nothing of it committed

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens whose keys and values are in the cache."""
        if self._changing:
            self._recover()
        return self._tokens

    def prefill(self, tokens: Sequence[int], on_progress: Callable[[int, int], None] | None = None) -> int:
        """Bring the cache to hold exactly `tokens`, reusing what it already has of them.

        Returns:
            How many tokens had to be decoded.

        Raises:
            DecodeAborted: stopped from outside; what was read until then is kept, but by models with a
                running state.
        """
        self.recall(tokens)
        self._begin()
        missing = tokens[self.cache.length :]
        # Under a row rule prompts too are read in pieces it allows. Then a token's keys and values do not
        # depend on what was read beside it or before it, and a cache that is reused gives the same text
        # as one that starts empty. Longer pieces are taken only where they were seen to give the same bits.
        start = 0
        while start < len(missing):
            n_tokens, rows = self._next_piece(len(missing) - start)
            if on_progress is not None and start == 0 and n_tokens < len(missing):
                on_progress(0, len(missing))
            piece = missing[start : start + n_tokens]
            if self.pieces is None or self.rule is None or self.pieces.is_proven(rows):
                self._read(piece, rows)
            else:
                self._try_long(piece, rows, self.pieces, self.rule)
            start += n_tokens
            for store in self.stores:
                store.keep(self.cache, self._tokens, tail=False)
            if on_progress is not None:
                on_progress(start, len(missing))
        self._changing = False
        return len(missing)

    @property
    def prompt_rows(self) -> int:
        """Most rows of a piece of a prompt."""
        if self.pieces is not None:
            return self.pieces.longest
        return self.rule.maximum if self.rule else self.context.n_rows

    def reads_at_once(self, rows: int) -> bool:
        """Whether so many tokens of a prompt are known to be read in one pass."""
        return self._next_piece(rows)[0] == rows and (self.pieces is None or self.pieces.is_proven(rows))

    def _next_piece(self, missing: int) -> tuple[int, int]:
        """Tokens of the next piece of a prompt, and the rows they are padded to."""
        if self.pieces is not None:
            return self.pieces.next(missing)
        tokens = min(missing, self.prompt_rows)
        return tokens, self._padded(tokens)

    def _read(self, piece: Sequence[int], rows: int) -> None:
        """Decode the next tokens of a prompt in one pass of so many rows."""
        self.cache.append(Batch.run(piece, self.cache.length, self.cache.open_paths), rows)
        self._tokens.extend(piece)

    def _try_long(self, piece: Sequence[int], rows: int, pieces: PrefillChunks, rule: RowRule) -> None:
        """Read a piece in short ones and then as a whole, and remember whether that gave the same bits."""
        start = self.cache.length
        for at in range(0, len(piece), rule.maximum):
            short = piece[at : at + rule.maximum]
            self._read(short, rule.padded(len(short)))
        expected = self.cache.save(start, self.cache.length)
        self._rewind(start)
        self._read(piece, rows)
        same = bytes(self.cache.save(start, self.cache.length)) == bytes(expected)
        pieces.found(rows, same)
        if not same:
            self._rewind(start)
            self.cache.restore(expected, len(piece))
            self._tokens.extend(piece)

    def recall(self, tokens: Sequence[int]) -> int:
        """Bring the cache to hold as much of the beginning of `tokens` as can be had without a pass.

        Returns:
            How many tokens it holds now.
        """
        self._begin()
        self._rewind(common_prefix(self._tokens, tokens))
        for store in self.stores:
            self._tokens[:] = tokens[: store.restore(self.cache, tokens)]
        self._changing = False
        return self.cache.length

    def keep(self, store: StateStore, text: Sequence[int]) -> int:
        """Have a store hold the state of as much of `text` as is in the cache, and no other text's.

        Returns:
            How many tokens that is. 0 if it is nothing of the text, or if a running state has gone on to
            another text behind it; then the store is as it was.
        """
        self._begin()
        known = common_prefix(self._tokens, text)
        if not self.cache.saves_parts and known < self.cache.length:
            known = 0
        if known or not text:
            store.keep(self.cache, self._tokens[:known], tail=True)
            store.prune(self._tokens[:known], parts=self.cache.saves_parts)
        self._changing = False
        return known

    def verify(self, trees: Sequence[TextTree]) -> TargetPass:
        """One pass over trees, each behind its text. The cache must hold the text but its last token.

        Args:
            trees: of different texts; the cache holds one text, so there is exactly one for now.

        Raises:
            DecodeAborted: stopped from outside; the text is as it was before.
        """
        self._begin()
        (text_tree,) = trees
        tree = text_tree.tree
        waited = self.context.waited_s
        self.cache.open(len(tree.leaves))
        batch = tree_batch(tree, self.cache.length)
        self.cache.try_branches(batch, self._padded(len(tree)), certain=1)
        logits = self.context.logits()
        self._guessing = True
        self._changing = False
        return TargetPass((Verified(logits),), self.context.waited_s - waited)

    def commit(self, trees: Sequence[TextTree], paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of the trees that were verified last, and drop the others.

        Args:
            paths: for each tree the nodes to keep, from its root on.
        """
        self._changing = True
        for text_tree, path in zip(trees, paths, strict=True):
            tree = text_tree.tree
            numbers, offsets = tree.sequences
            leaf = int(numbers[offsets[path[-1]]])
            accepted = [int(tree.tokens[node]) for node in path]
            self.cache.commit(leaf, len(path), used_paths=len(tree.leaves), n_rows=len(tree))
            self._tokens.extend(accepted)
        self._guessing = self._changing = False

    def rewind(self, length: int) -> None:
        """Forget the cached text from `length` on."""
        self._begin()
        self._rewind(length)
        self._changing = False

    def settle(self, length: int) -> None:
        """End an answer: forget what plain decoding would not have read by now."""
        self._begin()
        self.cache.settle(length)
        del self._tokens[self.cache.length :]
        self._changing = False

    def _begin(self) -> None:
        """A call that changes the cache begins; what an interrupted one left is dropped."""
        if self._changing or self._guessing:
            self._recover()
        self._changing = True

    def _recover(self) -> None:
        """Bring cache and tokens to what both are known to hold."""
        self._changing = True  # in case this is interrupted too
        self.cache.recover()
        self._rewind(len(self._tokens))
        self._changing = self._guessing = False

    def _rewind(self, length: int) -> None:
        self.cache.rewind(length)
        del self._tokens[self.cache.length :]

    def _padded(self, rows: int) -> int:
        return self.rule.padded(rows) if self.rule else rows

    def close(self) -> None:
        """Free the context and the weights."""
        self.context.close()
        self.model.close()


def tree_batch(tree: TokenTree, start: int) -> Batch:
    """The rows that decode a tree whose root stands at position `start`; every node wants logits."""
    numbers, offsets = tree.sequences
    return Batch(
        tokens=tree.tokens,
        positions=tree.depths + start,
        sequence_ids=numbers,
        offsets=offsets,
        wants_logits=np.ones(len(tree), dtype=np.bool_),
    )
