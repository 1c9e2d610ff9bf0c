"""The texts of a vocabulary's tokens, and the tokens whose texts begin with others or contain them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
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


class Spelling:
    """The texts of tokens as bytes. Searches ignore the case of ASCII letters."""

    def __init__(self, vocabulary: Speller) -> None:
        self._vocabulary = vocabulary

    def piece(self, token: int, *, control: bool = False) -> bytes:
        """The bytes that a token adds to the text; those of control tokens only if asked for."""
        return self._vocabulary.piece(token, control=control)

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
        found: list[int] = []
        at = self._joined.find(text)
        while at >= 0:
            found.append(at)
            at = self._joined.find(text, at + 1)
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
    def _joined(self) -> bytes:
        return _BETWEEN.join(self._sorted[0])


def backwards(sequence: Sequence[int], path: Sequence[int] = (), start: int = 0) -> Iterator[int]:
    """The tokens of a sequence from `start` on and of a path after it, the last one first."""
    yield from reversed(path)
    for place in range(len(sequence) - 1, start - 1, -1):
        yield sequence[place]
