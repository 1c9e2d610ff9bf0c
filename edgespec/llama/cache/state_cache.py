"""The cache of a model with a running state whose drafts may branch.

Layers with a running state fold each token into it, and cannot forget the last few. So a pass stores the
state after its certain rows only: those that are kept whatever the target chooses. Accepted tokens that are
not among them are pending: they belong to the text, and are the first certain rows of the next pass, so
nothing is read again for their sake alone.

The whole tree is one sequence of llama.cpp's, so that all products have all rows; see `StateBranches`. There
are two sequence ids. One, the home, holds the text; a pass begins with a copy of it in the other, where
llama.cpp keeps the state in memory of its own. If the pass is interrupted, or its text fails, that copy is
dropped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from edgespec.llama.cache.positions import Positions
from edgespec.llama.runtime.batch import EmbeddedBatch, IntArray, StateBranches, TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray

N_SEQUENCES = 2
_MANY = 256  # leaves: branches take no sequence ids here


@dataclass(frozen=True)
class _CachedTokens:
    """The known contents of the cache; replaced as a whole, so an interruption leaves one or the other."""

    home: int = 0  # the sequence that holds the text
    n_read: int = 0  # tokens whose state, keys and values are there
    pending: tuple[int, ...] = ()  # further tokens of the text
    trimmed: bool = True  # the sequence holds no cells behind these tokens


@dataclass(frozen=True)
class _DecodedTree:
    """A tree that was decoded in the other sequence.

    Attributes:
        tokens, parents: of its rows.
        leaf_rows: the row of each leaf, by the leaf's number.
        certain: leading rows that belong to the text, pending ones not counted.
    """

    tokens: list[int]
    parents: list[int]
    leaf_rows: list[int]
    certain: int


@dataclass(frozen=True)
class TreeRows:
    """The place of a tree's rows in its pass."""

    rows: IntArray  # (tree's rows,) of each, its row in the pass
    n_without: int  # leading rows of the pass that want no logits

    def select(self, logits: FloatArray) -> FloatArray:
        """The tree's rows of the pass's logits, as a view if that is possible."""
        places = self.rows - self.n_without
        if (np.diff(places) == 1).all():
            return logits[places[0] : places[-1] + 1]
        return logits[places]


class StateCache:
    """A KVCache whose state branches; see the module.

    Attributes:
        placement: of the rows that were tried last.
        positions: of the text's tokens; set by whoever has the sequence, before it is longer.
    """

    max_paths = _MANY
    n_free_ids = _MANY - 1
    open_paths = 1
    compactions = 0
    saves_parts = False

    def __init__(self, context: Context, *, ordered: bool) -> None:
        self.context = context
        self.ordered = ordered
        self.positions = Positions()
        self._cached = _CachedTokens()
        self._tried: _DecodedTree | None = None
        self.placement: TreeRows | None = None

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self._cached.n_read + len(self._cached.pending)

    @property
    def n_pending(self) -> int:
        """Tokens at the end of the text that the next pass will read."""
        return len(self._cached.pending)

    @property
    def n_live(self) -> int:
        """Tokens of the text."""
        return self.length

    def open(self, paths: int) -> None:
        """Do nothing: branches need no ids."""

    def fork(self, path: int, new_path: int, length: int) -> None:
        """Never called: only drafters fork."""

    def append(self, batch: TokenBatch, rows: int = 0) -> None:
        """Decode consecutive tokens that belong to the text; there must be none pending."""
        assert not self._cached.pending
        if isinstance(batch, EmbeddedBatch):
            self._decode_embeddings(batch)
        else:
            self._decode(batch, rows, certain=len(batch))
        self._adopt(len(batch), ())

    def reserve(self, n_rows: int) -> None:
        """Do nothing: cells are never moved."""

    def appended(self, n_tokens: int) -> None:
        """Do nothing: there are no shared passes, so only `append` reads a prompt."""
        assert not n_tokens

    def try_branches(self, batch: TokenBatch, rows: int = 0, certain: int = 0) -> None:
        """Decode a tree after the text, of which `commit` keeps one path.

        Args:
            certain: leading rows that `commit` will keep, if any.
        """
        self._tried = self._decode(batch, rows, max(certain, 1))

    def _decode_embeddings(self, batch: EmbeddedBatch) -> None:
        """Decode embeddings in the sequence that is not the text's."""
        self._copy_to_other()
        batch = replace(batch, sequence_ids=np.full(len(batch), 1 - self._cached.home, dtype=np.int32))
        if not self.context.model.keeps_cells:
            batch = replace(batch, positions=self._positions(np.arange(len(batch), dtype=np.int32)))
        self.context.decode(batch)

    def _copy_to_other(self) -> None:
        """Begin a pass in the sequence that is not the text's."""
        self.context.remove(1 - self._cached.home)
        end = self.positions.at(self._cached.n_read)
        self.context.copy(self._cached.home, 1 - self._cached.home, 0, end)

    def _decode(self, batch: TokenBatch, rows: int, certain: int) -> _DecodedTree:
        """Decode pending tokens and a tree in the sequence that is not the text's."""
        cached, pending = self._cached, self._cached.pending
        tried = tree_of(batch, certain)
        order = np.argsort(batch.positions, kind="stable").astype(np.int32)
        place = np.empty_like(order)
        place[order] = np.arange(len(order), dtype=np.int32)
        parents = np.array(tried.parents, dtype=np.int32)[order]
        n_before = len(pending)
        parents = np.where(parents >= 0, place[parents], -1) + n_before  # the root follows the pending ones
        tokens = np.concatenate([np.array(pending, dtype=np.int32), batch.tokens[order]])
        depths = np.concatenate([np.arange(n_before), batch.positions[order] - cached.n_read], dtype=np.int32)
        wants = batch.wants_logits[order]
        padding = max(rows - len(tokens), 0) if self.ordered else 0
        wants = np.concatenate([np.full(n_before, self.ordered and wants.any()), wants])
        all_parents = np.concatenate([np.arange(-1, n_before - 1), parents, np.full(padding, -1)])
        joined = TokenBatch(
            tokens=np.concatenate([tokens, np.repeat(tokens[:1], padding)]),
            # Padding comes behind all positions that the text may have afterwards, so its cells are dropped.
            positions=self._positions(np.concatenate([depths, np.full(padding, depths[-1] + 1)])),
            sequence_ids=np.full(len(tokens) + padding, 1 - cached.home, dtype=np.int32),
            offsets=np.arange(len(tokens) + padding + 1, dtype=np.int64),
            wants_logits=np.concatenate([wants, np.full(padding, batch.pads_logits)]),
            padding=padding,
            branches=None
            if len(tokens) + padding == n_before + certain
            else StateBranches(all_parents.astype(np.int32), n_before + certain, cached.n_read),
        )
        self._copy_to_other()
        self.context.decode(joined)
        self.placement = TreeRows(place + n_before, 0 if self.ordered else n_before)
        return tried

    def _positions(self, depths: IntArray) -> IntArray:
        """Positions of rows at these depths below the text's state."""
        if self.context.model.keeps_cells:
            return self.positions.of((depths + self._cached.n_read).astype(np.int32))
        # Without attention they mean nothing, and llama.cpp wants them to be consecutive.
        start = self.context.last_position(self._cached.home) + 1
        return np.arange(start, start + len(depths), dtype=np.int32)

    def commit(
        self, path: int, n_tokens: int, used_paths: int, n_rows: int, held: Collection[int] = ()
    ) -> None:
        """Keep the first `n_tokens` of a branch; the tokens behind the certain ones become pending."""
        tried, self._tried = self._tried, None
        if tried is None or n_tokens < tried.certain:
            self.context.remove(1 - self._cached.home)
            return
        rows = [row := tried.leaf_rows[path]]
        while (row := tried.parents[row]) >= 0:
            rows.append(row)
        accepted = [tried.tokens[row] for row in rows[::-1][:n_tokens]]
        self._adopt(tried.certain, tuple(accepted[tried.certain :]))

    def _adopt(self, n_certain: int, pending: tuple[int, ...]) -> None:
        """Make the other sequence, which has read the pending tokens and certain ones, the text."""
        cached = self._cached
        self._cached = _CachedTokens(1 - cached.home, self.length + n_certain, pending, trimmed=False)
        self._trim()

    def _trim(self) -> None:
        """Leave no cells but those of the text, in either sequence.

        The state cannot be cut, and a sequence with cells behind the text could not continue. So the
        sequences change their roles: the other one shares the state, and takes over the text's cells alone.
        """
        cached = self._cached
        other = 1 - cached.home
        self.context.remove(other)
        self.context.copy(cached.home, other, 0, self.positions.at(cached.n_read))
        self._cached = _CachedTokens(other, cached.n_read, cached.pending)
        self.context.remove(cached.home)

    def recover(self) -> None:
        """Drop everything but the text, wherever the last call was interrupted."""
        self._tried = None
        if not self._cached.trimmed:
            self._trim()
        self.context.remove(1 - self._cached.home)

    def rewind(self, length: int) -> None:
        """Forget the text from `length` on; all of it if the state has gone on behind that."""
        if length >= self.length:
            return
        if length >= self._cached.n_read:
            self._cached = _CachedTokens(
                self._cached.home,
                self._cached.n_read,
                self._cached.pending[: length - self._cached.n_read],
                self._cached.trimmed,
            )
        else:
            self.clear()

    def truncate_to(self, length: int) -> None:
        """Forget pending tokens after `length`; others are dropped when the next text differs there."""
        self.rewind(max(length, self._cached.n_read))

    def compact(self) -> None:
        """Do nothing: the text's cells are the first ones, in order."""

    def clear(self) -> None:
        self._cached = _CachedTokens()
        self._tried = None
        self.context.clear()

    def close(self) -> None:
        self.clear()

    def save(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        """The state after the whole text; there are no parts.

        Raises:
            ValueError: the tokens start .. end - 1 are not the whole text, or some of it is pending.
        """
        if (start, end) != (0, self._cached.n_read) or self._cached.pending:
            raise ValueError(f"the state after {self._cached.n_read} tokens is not that of {start} .. {end}")
        return self.context.save(self._cached.home)

    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        """Restore the state after a text of `n_tokens` tokens.

        Raises:
            BackendError: llama.cpp refused the state; the text is forgotten.
        """
        self.clear()
        self.context.restore(0, state)
        self._cached = _CachedTokens(0, n_tokens)


def same_states(
    one: ctypes.Array[ctypes.c_uint8], other: ctypes.Array[ctypes.c_uint8], n_tokens: int
) -> bool:
    """True if two states of a text are the same, bit for bit, except for the position of the running state.

    llama.cpp notes the position of a pass's last row there, which may have been padding.
    """
    a, b = (np.frombuffer(memoryview(state), dtype=np.uint8) for state in (one, other))
    if len(a) != len(b):
        return False
    differing = np.flatnonzero(a != b)
    if not len(differing):
        return True
    start = int(differing[0])
    if differing[-1] >= start + 4:
        return False
    positions = {int.from_bytes(x[start : start + 4].tobytes(), "little") for x in (a, b)}
    return positions == {n_tokens - 1, n_tokens}


def tree_of(batch: TokenBatch, certain: int) -> _DecodedTree:
    """The tree that a batch tells by its sequence ids: a row's parent is one row up in its first sequence."""
    first = batch.sequence_ids[batch.offsets[:-1]].tolist()
    depths = (batch.positions - batch.positions[0]).tolist()
    above: dict[tuple[int, int], int] = {}
    leaf_rows: dict[int, int] = {}
    parents: list[int] = []
    ids = batch.sequence_ids.tolist()
    for row, depth in enumerate(depths):
        parents.append(above.get((first[row], depth - 1), -1))
        for sequence in ids[batch.offsets[row] : batch.offsets[row + 1]]:
            above[sequence, depth] = row
            leaf_rows[sequence] = row
    leaves = [leaf_rows[number] for number in sorted(leaf_rows)]
    return _DecodedTree(batch.tokens.tolist(), parents, leaves, certain)
