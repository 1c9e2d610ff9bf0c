"""Numbers with an end: a model may otherwise write the digits of a number until its limit cuts the answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.constraint import Matcher
from edgespec.text.structured_output.token_bytes import TokenSpeller

MAX_DIGITS = 16
"""Digits in a row, as in llama.cpp's grammars."""

_BACKSLASH = ord("\\")


class DigitTokens:
    def __init__(self, vocabulary: TokenSpeller) -> None:
        self.vocabulary = vocabulary

    @cached_property
    def leading(self) -> NDArray[np.uint8]:
        """(n_vocab,) digits that each token begins with."""
        pieces = map(self.vocabulary.piece, range(self.vocabulary.n_tokens))
        counts = (len(piece) - len(piece.lstrip(b"0123456789")) for piece in pieces)
        return np.fromiter((min(count, 255) for count in counts), dtype=np.uint8)


@dataclass(frozen=True)
class _State:
    quote: int = 0  # the byte that ends the text that is being read
    escaped: bool = False
    digits: int = 0  # in a row up to here, outside of texts

    def after(self, piece: bytes, quotes: bytes) -> _State:
        quote, escaped, digits = self.quote, self.escaped, self.digits
        for byte in piece:
            is_digit = not quote and byte in b"0123456789"
            digits = digits + 1 if is_digit else 0
            if escaped:
                escaped = False
            elif quote:
                escaped = byte == _BACKSLASH
                quote = 0 if byte == quote else quote
            elif byte in quotes:
                quote = byte
        return _State(quote, escaped, digits)


class BoundedDigits:
    """A matcher of texts like JSON: a `speculation.constraint.Matcher` whose numbers have an end.

    More digits may follow only where nothing else may.

    Args:
        quotes: what stands around texts, whose digits do not count.
    """

    def __init__(
        self,
        matcher: Matcher,
        tokens: DigitTokens,
        quotes: bytes = b'"',
        states: tuple[_State, ...] = (_State(),),
    ) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._quotes = quotes
        self._states = list(states)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Take tokens as far as they may follow; returns how many."""
        for taken, token in enumerate(tokens):
            state = self._states[-1]
            exceeds = not state.quote and state.digits + self._tokens.leading[token] > MAX_DIGITS
            if (exceeds and not self.compute_logit_bias()[token]) or self._matcher.try_consume_tokens(
                [token]
            ) < 1:
                return taken
            self._states.append(state.after(self._tokens.vocabulary.piece(token), self._quotes))
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        """Take back the latest tokens."""
        del self._states[len(self._states) - num_tokens :]
        return self._matcher.rollback(num_tokens)

    def compute_logit_bias(self) -> bytes:
        """Compute a byte for each token, which is 0 unless the token may follow."""
        bias = self._matcher.compute_logit_bias()
        state = self._states[-1]
        if state.quote or not state.digits:
            return bias
        leading = self._tokens.leading
        mask = np.frombuffer(bias, dtype=np.uint8).copy()
        mask[: len(leading)] *= leading <= max(MAX_DIGITS - state.digits, 0)
        return mask.tobytes() if mask.any() else bias

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens of the only text that may follow, as far as it is certain."""
        return self._matcher.compute_ff_tokens()

    def is_accepting(self) -> bool:
        """True if the text may end here."""
        return self._matcher.is_accepting()

    def get_error(self) -> str:
        """The fault; empty if there is none."""
        return self._matcher.get_error()

    def deep_copy(self) -> BoundedDigits:
        """Return a matcher at the same place."""
        return BoundedDigits(self._matcher.deep_copy(), self._tokens, self._quotes, tuple(self._states))
