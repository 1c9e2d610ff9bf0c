"""The target: verifies a whole token tree per pass, and caches the text that was accepted."""

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
    """A text, and a tree of possible continuations, whose root is the text's last token."""

    text: Sequence[int]
    tree: TokenTree


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
    """

    verified: tuple[Verified, ...]
    waited_s: float


class Target:
    """Verifies trees in one pass each, and keeps the accepted path in its cache.

    Every call is atomic as far as later calls can tell: whatever it raises and wherever it is interrupted,
    the next call first discards what it left in the cache. The cached text may then be shorter than before,
    and the missing part is read again; it is never a different text.

    Attributes:
        rule: the row rule in force; None lets the number of rows choose the kernels.
        max_nodes: most nodes of a tree.
        max_leaves: most leaves of a tree.
        identity: everything that the contents of the cache depend on, except the tokens.
        stores: where the states of texts are kept on disk.
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
        self._changing = False  # a call has begun and not ended
        self._guessing = False  # a tree was verified, but nothing of it is committed yet

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens whose keys and values are in the cache."""
        if self._changing:
            self._recover()
        return self._tokens

    def prefill(self, tokens: Sequence[int], on_progress: Callable[[int, int], None] | None = None) -> int:
        """Make the cache hold exactly `tokens`, reusing what it already has of them.

        Returns:
            How many tokens had to be decoded.

        Raises:
            DecodeAborted: stopped from outside; what was read until then is kept, except by models with a
                recurrent state.
        """
        self.recall(tokens)
        self._begin()
        missing = tokens[self.cache.length :]
        # Under a row rule, prompts too are read in pieces that it allows. A token's keys and values then do
        # not depend on how the text was split into passes, so a reused cache gives the same text as an empty
        # one. Longer pieces are used only where they have been shown to give the same bits.
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

    def _read(self, piece: Sequence[int], rows: int) -> None:
        """Decode the next tokens of a prompt in one pass of this many rows."""
        self.cache.append(Batch.run(piece, self.cache.length, self.cache.open_paths), rows)
        self._tokens.extend(piece)

    def _try_long(self, piece: Sequence[int], rows: int, pieces: PrefillChunks, rule: RowRule) -> None:
        """Read a piece in short pieces and then as a whole, and record whether both gave the same bits."""
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
        """Make the cache hold as long a prefix of `tokens` as possible without a pass.

        Returns:
            How many tokens it now holds.
        """
        self._begin()
        self._rewind(common_prefix(self._tokens, tokens))
        for store in self.stores:
            self._tokens[:] = tokens[: store.restore(self.cache, tokens)]
        self._changing = False
        return self.cache.length

    def keep(self, store: StateStore, text: Sequence[int]) -> int:
        """Make a store hold the state of as much of `text` as is in the cache, and of no other text.

        Returns:
            How many tokens that is. 0 if the cache holds nothing of the text, or if a recurrent state has
            already moved past it; the store is then left unchanged.
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
        """One pass over trees, each after its text. The cache must hold the text except its last token.

        Args:
            trees: trees of different texts; the cache holds one text, so exactly one for now.

        Raises:
            DecodeAborted: stopped from outside; the cached text is unchanged.
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
        """Keep the accepted nodes of the trees that were verified last, and discard the others.

        Args:
            paths: for each tree, the nodes to keep, from its root on.
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
        """End an answer: forget what plain decoding would not have read by its end."""
        self._begin()
        self.cache.settle(length)
        del self._tokens[self.cache.length :]
        self._changing = False

    def _begin(self) -> None:
        """Begin a call that changes the cache, and discard what an interrupted one left behind."""
        if self._changing or self._guessing:
            self._recover()
        self._changing = True

    def _recover(self) -> None:
        """Reset cache and tokens to what both are known to hold."""
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
    """The rows that decode a tree with its root at position `start`, with logits for every node."""
    numbers, offsets = tree.sequences
    return Batch(
        tokens=tree.tokens,
        positions=tree.depths + start,
        sequence_ids=numbers,
        offsets=offsets,
        wants_logits=np.ones(len(tree), dtype=np.bool_),
    )
