"""The spelling of tokens in an answer, and those of them that lead to a mark, or past it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]


class TokenSpeller(Protocol):
    """The part of a vocabulary that is used here."""

    n_tokens: int

    def piece(self, token: int, *, control: bool = False) -> bytes: ...


class TokenBytes:
    """The bytes of every token, those of certain control tokens included.

    Args:
        shown: control tokens that are marks, so that their text counts.
    """

    def __init__(self, vocabulary: TokenSpeller, shown: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._towards: dict[bytes, BoolArray] = {}
        self._past: dict[tuple[bytes, bytes], list[tuple[int, bytes]]] = {}

    @property
    def n_tokens(self) -> int:
        return self._vocabulary.n_tokens

    def __getitem__(self, token: int) -> bytes:
        return self._vocabulary.piece(token, control=token in self._shown)

    def only(self, tokens: Sequence[int]) -> BoolArray:
        """(n_vocab,) these tokens and no others."""
        mask = np.zeros(self.n_tokens, dtype=np.bool_)
        mask[list(tokens)] = True
        return mask

    def space(self, most: int) -> BoolArray:
        """(n_vocab,) tokens that spell nothing but space, at most so many bytes."""
        return self.only([token for token, piece in self._space if len(piece) <= most])

    def towards(self, mark: bytes) -> BoolArray:
        """(n_vocab,) tokens that spell the beginning of a mark, or all of it and more."""
        if mark not in self._towards:
            found = (t for t, p in enumerate(self._all) if p and (mark.startswith(p) or p.startswith(mark)))
            self._towards[mark] = self.only(list(found))
        mask: BoolArray = self._towards[mark].copy()
        return mask

    def unless(self, tail: bytes, mark: bytes, fits: Callable[[bytes], bool]) -> BoolArray | None:
        """(n_vocab,) all tokens but those that complete a mark after `tail` and do not fit behind it.

        Args:
            fits: whether bytes may follow the mark.

        Returns:
            None if that leaves all tokens.
        """
        wrong = [token for token, rest in self._past_mark(tail, mark) if not fits(rest)]
        if not wrong:
            return None
        mask = np.ones(self.n_tokens, dtype=np.bool_)
        mask[wrong] = False
        return mask

    def fitted(self, mask: BoolArray) -> BoolArray:
        """(n_vocab,) a mask of a grammar engine, which may be longer."""
        return mask[: self.n_tokens]

    def _past_mark(self, tail: bytes, mark: bytes) -> list[tuple[int, bytes]]:
        """Tokens that complete a mark after `tail`, each with the bytes that it adds behind the mark."""
        # What matters of the tail is its longest end that the mark begins with.
        starts = (n for n in range(min(len(tail), len(mark) - 1), 0, -1) if mark.startswith(tail[-n:]))
        tail = tail[-next(starts, 0) :] if tail else b""
        tail = tail if mark.startswith(tail) else b""
        if not tail:
            return []  # no token of a real vocabulary holds a whole mark and more
        key = (tail, mark)
        if key not in self._past:
            found = []
            for token, piece in enumerate(self._all):
                at = (tail + piece).find(mark)
                if at >= 0 and at + len(mark) < len(tail) + len(piece):
                    found.append((token, (tail + piece)[at + len(mark) :]))
            self._past[key] = found
        return self._past[key]

    @cached_property
    def _space(self) -> list[tuple[int, bytes]]:
        return [(token, piece) for token, piece in enumerate(self._all) if piece and not piece.strip()]

    @cached_property
    def _all(self) -> list[bytes]:
        return [self[token] for token in range(self.n_tokens)]
