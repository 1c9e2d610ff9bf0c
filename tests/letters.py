"""A vocabulary of short texts."""

from __future__ import annotations

from collections.abc import Sequence


class Letters:
    """Tokens that spell these texts."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = [piece.encode() for piece in pieces]
        self.n_tokens = len(pieces)

    def piece(self, token: int, *, control: bool = False) -> bytes:
        del control  # there are no control tokens
        return self.pieces[token]

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode()
