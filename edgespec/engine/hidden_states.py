"""The target's hidden states, handed to the drafter that reads them: a draft head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.engine.sequence import TextSequence
from edgespec.speculation.tree import FloatArray


class HiddenStates(Protocol):
    """Access to the hidden states of the last decode; see llama.heads.tap."""

    def rows(self) -> FloatArray: ...


class HiddenReader(Protocol):
    """A drafter that reads the hidden states of committed tokens."""

    def receive(self, sequence: TextSequence, start: int, hidden: FloatArray) -> None:
        """Tokens of a sequence were read. Computes nothing, so it cannot be interrupted.

        Args:
            sequence: in the cache up to the last of these tokens.
            start: of the first.
            hidden: (tokens, width) of each.
        """

    def digest(self) -> None:
        """Compute what is wanted of the hidden states that were taken, so that they need not be kept.

        Raises:
            DecodeAborted: stopped from outside; the rest is computed later.
        """

    def closed(self, sequence: TextSequence) -> None:
        """A sequence was forgotten, and its place in the cache with it."""


class HiddenFeed:
    """Hands a reader the hidden states of every token that joins a sequence; does nothing without one."""

    def __init__(self) -> None:
        self._states: HiddenStates | None = None
        self._reader: HiddenReader | None = None

    def connect(self, states: HiddenStates, reader: HiddenReader) -> None:
        """Give a reader the hidden states from now on."""
        self._states, self._reader = states, reader

    def show(self, sequence: TextSequence, start: int, rows: slice | Sequence[int]) -> None:
        """Show the reader the hidden states of rows of the last decode that a sequence kept.

        Of sequences with images nothing is shown: heads read a token beside each state.

        Args:
            start: position of the first in the sequence.
        """
        if self._states is not None and self._reader is not None and not sequence.images:
            self._reader.receive(sequence, start, self._states.rows()[rows].copy())

    def digest(self) -> None:
        """Pass them to the reader; see `HiddenReader`."""
        if self._reader is not None:
            self._reader.digest()

    def closed(self, sequence: TextSequence) -> None:
        """Tell the reader that a sequence was forgotten."""
        if self._reader is not None:
            self._reader.closed(sequence)
