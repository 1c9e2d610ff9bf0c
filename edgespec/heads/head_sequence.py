"""One sequence in a draft head: its known features, what was read with them, and its last tree.

The head reads a token together with the feature of the token before it. So its cache has a row for each token
but the first: row r holds token r + 1 and feature r. Features of drafted tokens are the head's own; once the
target has accepted tokens, their rows are read again with the features of its true hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgespec.drafters.draft_sequence import DraftSequence
from edgespec.llama.cache.kv_cache import KVCache, inherit
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.speculation.growth import Frontier
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import FloatArray


class HeadSequence(DraftSequence):
    """A sequence that a head drafts for.

    Features may be known from the middle of the sequence on only, if its beginning was restored from disk and
    never computed here. The head then knows nothing of that beginning; rows and positions are counted from
    there.

    Args:
        width: elements of a feature.

    Attributes:
        known_sequence: the sequence up to the last token whose feature is known.
    """

    def __init__(self, cache: KVCache, n_vocab: int, width: int) -> None:
        super().__init__(cache, n_vocab)
        self.known_sequence: list[int] = []
        self.unread = 1  # the tokens up to the first whose feature is known
        self._features: FloatArray = np.empty((0, width), dtype=np.float32)
        self._first = 0  # the row that the first of these features belongs to
        self._of_nodes: dict[int, FloatArray] = {}

    @property
    def n_rows(self) -> int:
        """Rows whose features are known; the last one's token may not be."""
        return max(len(self.known_sequence) - self.unread + 1, 0)

    @property
    def readable(self) -> int:
        """Rows that can be read and were not, as their tokens and features are known."""
        return max(self.n_rows - 1 - len(self.read), 0)

    def _left_out(self, length: int) -> int:
        """As many as now: rows whose features are gone cannot be read again."""
        del length
        return self.unread

    def add_features(self, tokens: Sequence[int], start: int, features: FloatArray) -> None:
        """Learn the features of the sequence's tokens from `start` on.

        Args:
            tokens: the sequence up to the last of these tokens.
            features: (tokens, width).
        """
        self.forget_tree()
        first = self.unread - 1
        if not first <= start <= len(self.known_sequence) or self.known_sequence[:start] != list(
            tokens[:start]
        ):
            self.forget()
            self.unread = start + 1
        else:
            self._shorten(start - first, tokens[start])
        self.known_sequence = list(tokens)
        self._features = np.concatenate([self._features, features])

    def begin_like(self, source: HeadSequence, length: int) -> None:
        """Share what is known of another sequence's first `length` tokens; this one must be empty."""
        rows = length - source.unread + 1
        read = min(len(source.read), rows)
        source.forget_tree()
        inherit(self.cache, source.cache, read)
        self.read = source.read[:read]
        self.known_sequence, self.unread = source.known_sequence[:length], source.unread
        self._features = source._features[: max(rows - source._first, 0)]
        self._first = min(source._first, rows)

    def _shorten(self, rows: int, token: int) -> None:
        """Keep what is known of the first rows; `token` follows them."""
        kept = max(rows - 1, 0)  # the last row holds the token that came next before
        if len(self.read) > kept:
            if rows and self.read[kept] == token:
                kept = rows
            elif rows and self._first > kept:
                # Its feature is gone: one row with another token does less harm than forgetting all.
                self.read[kept] = token
                kept = rows
            self._cut(kept)
        self._features = self._features[: max(rows - self._first, 0)]
        if not len(self._features):
            self._first = rows

    def _cut(self, rows: int) -> None:
        if rows < len(self.read):
            self.cache.rewind(rows)
            del self.read[rows:]

    def forget(self) -> None:
        """Forget everything that is known and was read, and the last tree."""
        self.forget_tree()
        super().forget()
        self.known_sequence, self.unread = [], 1
        self._features, self._first = self._features[:0], 0

    def recover(self) -> None:
        """Return to the rows that were certainly read, and forget the last tree."""
        super().recover()
        # Rows may be lost whose features are gone, or only some of what belongs together was set.
        if self._first > len(self.read) or self._first + len(self._features) != self.n_rows:
            self.forget()

    def forget_tree(self) -> None:
        """Drop the branches of the last tree from the cache."""
        super().forget_tree()
        self._of_nodes = {}

    def prepare_reading(self) -> None:
        """Make all rows pending that can be read without the root."""
        self.forget_tree()
        start = self.unread + len(self.read)
        self.pending = self.known_sequence[start : start + self.readable]

    def keep_accepted(
        self, ranking: Ranking | None, count: int = 0, *, alone: bool = False, room: int = 0
    ) -> None:
        """Drop the last tree; tokens that joined the sequence are pending, to be read with true features."""
        del ranking, count, alone, room
        self.forget_tree()
        self.root_was_known = False
        self._cut(len(self._sequence) - 1)  # the root is read again for its logits and its feature
        self.pending = self._sequence[len(self.read) :]

    def pending_batch(self) -> TokenBatch:
        """The rows that read the pending tokens; a head wants the logits of all rows or of none."""
        return self._sequence_batch(self.pending, "all")

    def _sequence_batch(self, tokens: Sequence[int], logits: str) -> TokenBatch:
        start = len(self.read) - self._first
        features = self._features[start : start + len(tokens)]
        return replace(super()._sequence_batch(tokens, logits), features=features)

    def _note_read(self, n_tokens: int) -> None:
        super()._note_read(n_tokens)
        # The last row is read again for the next tree, if the target accepts nothing in between.
        gone = max(len(self.read) - 1 - self._first, 0)
        self._features = self._features[gone:]
        self._first += gone

    def branch_batch(self, frontier: Frontier, room: int = 0) -> tuple[list[int], TokenBatch | None]:
        rows, batch = super().branch_batch(frontier)  # nothing ahead: the features above would be missing
        if batch is None:
            return rows, None
        parents = frontier.parents[rows].tolist()
        return rows, replace(batch, features=np.stack([self._of_nodes[parent] for parent in parents]))

    def keep_features(self, frontier: Frontier, rows: Sequence[int], features: FloatArray) -> None:
        """Keep what the head computed for nodes, for their children.

        Args:
            rows: the nodes of the frontier that were read.
            features: (rows, width).
        """
        for row, feature in zip(rows, features, strict=True):
            self._of_nodes[int(frontier.nodes[row])] = feature
