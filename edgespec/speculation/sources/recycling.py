"""Recycled tokens: what the target found likely after the same tokens in an earlier pass.

A pass yields the target's distribution after every node of a tree, and uses it on the accepted path alone.
Token recycling (Luo et al. 2024, section 3) keeps the likeliest successors of each token from all of them,
and drafts from those; the latest ones win. Here, successors of pairs of tokens are kept too, and come first.
The rest of the candidates, which is all of them after a token that is new, are what was likely in the last
token's place.

The table is in memory only, and holds the same 1.6 megabytes whatever is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.evidence import NOTHING, CandidateSource, RecycledFrom, recycled_classes
from edgespec.speculation.growth import Frontier
from edgespec.speculation.sources.base import (
    KEPT_OF_ROWS,
    Candidates,
    Proposals,
    Proposer,
    TargetRows,
)
from edgespec.speculation.spliced import behind_seams
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

_ORDERS = 2  # the last token, or the last two
_ROWS = 1 << 12  # contexts of each order; where two fall into one row, the later one stays
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio (Knuth's multiplicative hashing)
_UNSEEN = np.uint64(2**64 - 1)  # no pair of token ids


Keys = NDArray[np.uint64]


class Successors:
    """The latest likely successors of tokens and of pairs of tokens."""

    def __init__(self) -> None:
        self._keys = np.full((_ORDERS, _ROWS), _UNSEEN)
        self._tokens = np.zeros((_ORDERS, _ROWS, KEPT_OF_ROWS), dtype=np.int32)
        self._chances = np.zeros((_ORDERS, _ROWS, KEPT_OF_ROWS), dtype=np.float16)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._keys.nbytes + self._tokens.nbytes + self._chances.nbytes

    def put(self, before: IntArray, last: IntArray, tokens: IntArray, chances: FloatArray) -> None:
        """Keep the successors of contexts.

        Args:
            before, last: (rows,) the last two tokens of each context.
            tokens, chances: (rows, kept) the likeliest tokens after it, with their probabilities.
        """
        tokens, chances = tokens[:, :KEPT_OF_ROWS], chances[:, :KEPT_OF_ROWS]
        self._set(_pair_keys(before, last), RecycledFrom.PAIR, tokens, chances)
        self._set(last.astype(np.uint64), RecycledFrom.TOKEN, tokens, chances)

    def join(
        self, keys: Keys, order: RecycledFrom, found: Sequence[dict[int, int]], said: RecycledFrom
    ) -> None:
        """Add the successors of contexts to candidates that were found for them, as far as there is room.

        Args:
            order: what the keys are of.
            said: what the successors are there.
        """
        rows = _places(keys)
        known = np.flatnonzero(self._keys[order, rows] == keys)
        tokens = self._tokens[order, rows[known]].tolist()
        classes = recycled_classes(self._chances[order, rows[known]], said).tolist()
        for at, successors, kinds in zip(known.tolist(), tokens, classes, strict=True):
            _fill(found[at], zip(successors, kinds, strict=True))

    def _set(self, keys: Keys, order: RecycledFrom, tokens: IntArray, chances: FloatArray) -> None:
        rows, kept = _places(keys), tokens.shape[1]
        self._keys[order, rows] = keys
        self._tokens[order, rows, :kept] = tokens
        self._chances[order, rows, :kept] = chances
        self._chances[order, rows, kept:] = 0


class _Followed(Proposals):
    """The successors of the paths of one tree."""

    def __init__(self, successors: Successors, sequence: Sequence[int]) -> None:
        self._successors = successors
        # The last tokens of the path to each node; the first ones stand in for what is not there.
        self._tokens = {0: (sequence[-min(len(sequence), 3)], sequence[-min(len(sequence), 2)], sequence[-1])}

    def below(self, frontier: Frontier) -> list[Candidates]:
        for node, parent, token in zip(
            frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True
        ):
            if node:
                self._tokens[node] = (*self._tokens[parent][1:], token)
        paths = np.array([self._tokens[node] for node in frontier.nodes.tolist()], dtype=np.int32)
        earlier, before, last = paths.T
        found: list[dict[int, int]] = [{} for _ in paths]
        pairs, tokens, rivals = _pair_keys(before, last), last.astype(np.uint64), _pair_keys(earlier, before)
        self._successors.join(pairs, RecycledFrom.PAIR, found, RecycledFrom.PAIR)
        self._successors.join(tokens, RecycledFrom.TOKEN, found, RecycledFrom.TOKEN)
        for candidates, token in zip(found, last.tolist(), strict=True):
            candidates.setdefault(token, NOTHING)  # a token is no rival of itself
        self._successors.join(rivals, RecycledFrom.PAIR, found, RecycledFrom.RIVAL)
        return [{token: kind for token, kind in candidates.items() if kind} for candidates in found]


class RecycledSource(Proposer):
    """Proposes what the target found likely in earlier passes."""

    name = "token recycling"
    source = CandidateSource.RECYCLED
    keeps_passes = True

    def __init__(self) -> None:
        self.forget()

    def propose(self, sequence: Sequence[int], depth: int) -> Proposals:
        """Propose what the target found likely after each path's last tokens, or in place of the last one."""
        del depth
        return _Followed(self._successors, behind_seams(sequence))

    def observe(self, sequence: Sequence[int], tree: TokenTree, rows: TargetRows) -> None:
        """Keep what the target said after these nodes: the root, which is certain, last, so that it stays."""
        sequence = behind_seams(sequence)
        before_root = sequence[-2] if len(sequence) > 1 else sequence[-1]
        nodes = rows.nodes[::-1]
        above = tree.parents[nodes]
        before = np.where(above < 0, before_root, tree.tokens[above])
        self._successors.put(before, tree.tokens[nodes], rows.tokens[::-1], rows.chances[::-1])

    def forget(self) -> None:
        self._successors = Successors()


def _fill(candidates: dict[int, int], more: Iterable[tuple[int, int]]) -> None:
    """Add candidates with their classes, as far as there is room."""
    for token, kind in more:
        if len(candidates) >= KEPT_OF_ROWS:
            return
        if kind:
            candidates.setdefault(token, kind)


def _pair_keys(before: IntArray, last: IntArray) -> Keys:
    keys: Keys = last.astype(np.uint64) | ((before.astype(np.uint64) + np.uint64(1)) << np.uint64(32))
    return keys


def _places(keys: Keys) -> NDArray[np.int64]:
    """The rows that contexts fall into."""
    places: NDArray[np.int64] = ((keys * _MIX) >> np.uint64(64 - _ROWS.bit_length() + 1)).astype(np.int64)
    return places
