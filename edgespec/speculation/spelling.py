"""The texts of a vocabulary's tokens, and the tokens whose texts begin with others or contain them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

_BETWEEN = b"\xff"  # in no text: it is not UTF-8


class Speller(Protocol):
    """The part of a vocabulary that is used here."""

    @property
    def n_tokens(self) -> int: ...
    def piece(self, token: int, *, control: bool = False) -> bytes: ...
    def ends(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]: ...


class Spelling:
    """The texts of tokens as bytes. Searches ignore the case of ASCII letters."""

    def __init__(self, vocabulary: Speller) -> None:
        self._vocabulary = vocabulary

    def piece(self, token: int, *, control: bool = False) -> bytes:
        """The bytes that a token adds to the text; those of control tokens only if asked for."""
        return self._vocabulary.piece(token, control=control)

    @cached_property
    def end_tokens(self) -> Tokens:
        tokens = np.arange(self._vocabulary.n_tokens, dtype=np.int32)
        return np.flatnonzero(self._vocabulary.ends(tokens))

    def ending(self, backwards: Iterable[int], size: int, *, control: bool = False) -> bytes:
        """Up to `size` last bytes of the text of tokens.

        Args:
            backwards: the tokens, the last one first; no more of them are taken than are needed.
            control: as for `piece`.
        """
        found = b""
        if size > 0:
            for token in backwards:
                found = self.piece(token, control=control) + found
                if len(found) >= size:
                    break
        return found[max(len(found) - size, 0) :]

    def beginning_with(self, text: bytes) -> Tokens:
        """The tokens whose texts begin with a text in lower case."""
        pieces, tokens, _ = self._sorted
        first = bisect_left(pieces, text)
        behind = bisect_right(pieces, text, lo=first, key=lambda piece: piece[: len(text)])
        return tokens[first:behind]

    def containing(self, text: bytes) -> Tokens:
        """The tokens whose texts contain a text in lower case."""
        _, tokens, ends = self._sorted
        if len(text) == 1:
            found = np.flatnonzero(self._joined == text[0])
        else:  # look where its rarest pair of letters is
            places, starts = self._pairs
            pairs = [256 * one + other for one, other in pairwise(text)]
            rarest = min(range(len(pairs)), key=lambda at: starts[pairs[at] + 1] - starts[pairs[at]])
            first, behind = starts[pairs[rarest] : pairs[rarest] + 2]
            found = places[first:behind].astype(np.int64) - rarest
            found = found[found >= 0]
            for at, letter in enumerate(text):
                found = found[np.take(self._joined, found + at, mode="clip") == letter]
        return tokens[np.unique(np.searchsorted(ends, found, side="right"))]

    @cached_property
    def _sorted(self) -> tuple[list[bytes], Tokens, Tokens]:
        """The texts in lower case and in order, their tokens, and where each ends in `_joined`."""
        pieces = [self.piece(token).lower() for token in range(self._vocabulary.n_tokens)]
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        ordered = [pieces[token] for token in order]
        ends = np.cumsum([len(piece) + len(_BETWEEN) for piece in ordered])
        return ordered, np.array(order, dtype=np.int64), ends

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int32], Tokens]:
        """The places of all pairs of letters in `_joined`, by pair, and where those of each pair begin."""
        pairs = (self._joined[:-1].astype(np.uint16) << 8) | self._joined[1:]
        starts = np.concatenate([[0], np.cumsum(np.bincount(pairs, minlength=1 << 16))])
        return np.argsort(pairs, kind="stable").astype(np.int32), starts

    @cached_property
    def _joined(self) -> NDArray[np.uint8]:
        return np.frombuffer(b"".join(piece + _BETWEEN for piece in self._sorted[0]), dtype=np.uint8)


def backwards(sequence: Sequence[int], path: Sequence[int] = (), start: int = 0) -> Iterator[int]:
    """The tokens of a sequence from `start` on and of a path after it, the last one first."""
    yield from reversed(path)
    for place in range(len(sequence) - 1, start - 1, -1):
        yield sequence[place]
