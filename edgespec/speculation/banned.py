"""Banned strings: texts that an answer must not contain.

A token that would complete one after the text so far is refused, and the next best is chosen. What is refused
follows from the text alone, so the answer is the same with any drafter and tree, and nothing that was chosen
is ever taken back: it can be streamed at once, and models that cannot go back (recurrent ones) need not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from edgespec.speculation.spelling import Spelling, Tokens, backwards


class BannedStrings:
    """The banned strings of one answer, regardless of the case of ASCII letters.

    Args:
        start: where the answer begins in the sequence.
    """

    def __init__(self, strings: Iterable[str], spelling: Spelling, start: int) -> None:
        self._strings = sorted({text.encode("utf-8", "replace").lower() for text in strings})
        self._spelling = spelling
        self._start = start
        self._most = max(map(len, self._strings)) - 1  # bytes of the text that can matter
        self._refused: dict[bytes, Tokens] = {}  # by what is missing of a string
        self._always = np.unique(np.concatenate([spelling.containing(text) for text in self._strings]))

    def refused(self, sequence: Sequence[int], path: Sequence[int] = ()) -> Tokens:
        """The tokens that would complete a banned string after a sequence and a path; some of them twice."""
        text = self._spelling.ending(backwards(sequence, path, self._start), self._most).lower()
        refused = [self._always]
        for size in range(1, len(text) + 1):
            begun = text[-size:]
            for place in range(bisect_left(self._strings, begun), len(self._strings)):
                if not self._strings[place].startswith(begun):
                    break
                if missing := self._strings[place][size:]:  # a drafted path may have a whole one
                    if missing not in self._refused:
                        self._refused[missing] = self._spelling.beginning_with(missing)
                    refused.append(self._refused[missing])
        return np.concatenate(refused)
