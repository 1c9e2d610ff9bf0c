"""Recycled tokens: what the target found likely after the same tokens in an earlier pass.

A pass yields the target's distribution after every node of a tree, and uses it on the accepted path alone.
Token recycling (Luo et al. 2024, section 3) keeps the likeliest successors of each token from all of them,
and drafts from those; the latest ones win. Here, successors of pairs of tokens are kept too, and come first.

The table is in memory only, and holds the same few hundred kilobytes whatever is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.evidence import ORDERS, Source, recycled_classes
from edgespec.speculation.growth import Frontier
from edgespec.speculation.sources.base import (
    MOST_CANDIDATES,
    Candidates,
    Proposals,
    Proposer,
    TargetRows,
)
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

_ROWS = 1 << 14  # contexts of each order; where two fall into one row, the later one stays
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio (Knuth's multiplicative hashing)
_UNSEEN = np.uint64(2**64 - 1)  # no pair of token ids

Keys = NDArray[np.uint64]


class Successors:
    """The latest likely successors of tokens and of pairs of tokens."""

    def __init__(self) -> None:
        self._keys = np.full((ORDERS, _ROWS), _UNSEEN)
        self._tokens = np.zeros((ORDERS, _ROWS, MOST_CANDIDATES), dtype=np.int32)
        self._classes = np.zeros((ORDERS, _ROWS, MOST_CANDIDATES), dtype=np.int8)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._keys.nbytes + self._tokens.nbytes + self._classes.nbytes

    def put(self, before: IntArray, last: IntArray, tokens: IntArray, chances: FloatArray) -> None:
        """Keep the successors of contexts.

        Args:
            before, last: (rows,) the last two tokens of each context.
            tokens, chances: (rows, kept) the likeliest tokens after it, with their probabilities.
        """
        kept = min(tokens.shape[1], MOST_CANDIDATES)
        for order in range(ORDERS):
            keys = _keys(before, last, order)
            rows = _places(keys)
            self._keys[order, rows] = keys
            self._tokens[order, rows, :kept] = tokens[:, :kept]
            self._classes[order, rows, :kept] = recycled_classes(chances[:, :kept], order + 1)
            self._classes[order, rows, kept:] = 0

    def after(self, before: IntArray, last: IntArray) -> list[Candidates]:
        """Successors of each context: those of the pair first, then those of its last token."""
        found: list[dict[int, int]] = [{} for _ in last]
        for order in reversed(range(ORDERS)):
            keys = _keys(before, last, order)
            rows = _places(keys)
            known = np.flatnonzero(self._keys[order, rows] == keys)
            tokens = self._tokens[order, rows[known]].tolist()
            classes = self._classes[order, rows[known]].tolist()
            for at, successors, kinds in zip(known.tolist(), tokens, classes, strict=True):
                candidates = found[at]
                for token, kind in zip(successors, kinds, strict=True):
                    if len(candidates) == MOST_CANDIDATES:
                        break
                    if kind and token not in candidates:
                        candidates[token] = kind
        return list(found)


class _Followed(Proposals):
    """The successors of the paths of one tree."""

    def __init__(self, successors: Successors, text: Sequence[int]) -> None:
        self._successors = successors
        self._tokens = {-1: text[-2] if len(text) > 1 else text[-1]}  # node -> token

    def below(self, frontier: Frontier) -> list[Candidates]:
        self._tokens |= zip(frontier.nodes.tolist(), frontier.tokens.tolist(), strict=True)
        before = np.array([self._tokens[parent] for parent in frontier.parents.tolist()], dtype=np.int32)
        return self._successors.after(before, frontier.tokens)


class RecycledSource(Proposer):
    """Proposes what the target found likely after the same tokens before."""

    name = "recycling"
    source = Source.RECYCLED
    keeps_passes = True

    def __init__(self) -> None:
        self._successors = Successors()

    def propose(self, text: Sequence[int], depth: int) -> Proposals:
        """What the target found likely after the last tokens of each path."""
        del depth
        return _Followed(self._successors, text)

    def observe(self, text: Sequence[int], tree: TokenTree, rows: TargetRows) -> None:
        """Keep what the target said after these nodes: the root, which is certain, last, so that it stays."""
        before_root = text[-2] if len(text) > 1 else text[-1]
        nodes = rows.nodes[::-1]
        above = tree.parents[nodes]
        before = np.where(above < 0, before_root, tree.tokens[above])
        self._successors.put(before, tree.tokens[nodes], rows.tokens[::-1], rows.chances[::-1])

    def forget(self) -> None:
        self._successors = Successors()


def _keys(before: IntArray, last: IntArray, order: int) -> Keys:
    keys = last.astype(np.uint64)
    return keys | ((before.astype(np.uint64) + np.uint64(1)) << np.uint64(32)) if order else keys


def _places(keys: Keys) -> NDArray[np.int64]:
    """The rows that contexts fall into."""
    places: NDArray[np.int64] = ((keys * _MIX) >> np.uint64(64 - _ROWS.bit_length() + 1)).astype(np.int64)
    return places
