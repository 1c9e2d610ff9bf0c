"""DRY ("don't repeat yourself"): a penalty for tokens that would continue a repetition.

The penalties are llama.cpp's, after Philipp Emanuel Weidmann
(https://github.com/oobabooga/text-generation-webui/pull/5677). llama.cpp compares the end of the text with
all of it for each token. Here a token costs only a look at the places where its pair occurred before, so the
nodes of a tree are cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.spelling import Spelling, Tokens, backwards
from edgespec.speculation.tree import FloatArray

_LARGEST_LOG = 88.7228391  # of a number in single precision, as in llama.cpp
_MOST = 1e30  # a penalty that leaves a finite logit
_SHIFT = 32  # bits of a token's number
_NONE = np.empty(0, dtype=np.int64)


class _End(NamedTuple):
    """The end of a text."""

    behind: Tokens  # the positions behind all places where its last pair occurred before, in order
    sizes: Tokens  # how many of the last tokens are the same there
    unbroken: int  # how many tokens follow the last sequence breaker, or at least as many as the largest size


class RepetitionPenalty:
    """DRY's penalties for the answer that continues one sequence.

    Args:
        spelling: for the sequence breakers; may be None if there are none.
    """

    def __init__(self, config: GenerationConfig, spelling: Spelling | None) -> None:
        self._config = config
        self._spelling = spelling
        self._breakers = [text.encode("utf-8", "replace") for text in config.dry_sequence_breakers]
        self._breaker_bytes = max(map(len, self._breakers), default=1) - 1
        self._breaks: dict[int, bool] = {}
        # Shorter repetitions than this are not looked at: a token, or a pair of them.
        self._size = min(config.dry_allowed_length, 2)
        self._length = 0  # of the sequence that is known
        self._keys = self._behind = _NONE  # of all pairs of the prompt, in order
        self._recent: dict[int, list[int]] = {}  # the same for the answer
        self._known: dict[tuple[int, ...], _End] = {(): _End(_NONE, _NONE, 0)}  # by path after the sequence

    def penalties(self, sequence: Sequence[int], path: Sequence[int] = ()) -> tuple[Tokens, FloatArray]:
        """The tokens that would continue a repetition after a sequence and a path, and their penalties."""
        c = self._config
        behind, sizes, unbroken = self._end(sequence, tuple(path))
        length = len(sequence) + len(path)
        start = max(length - c.dry_penalty_last_n, 0) if c.dry_penalty_last_n >= 0 else 0
        sizes = np.minimum(np.minimum(sizes, behind - start), unbroken)
        order = np.argsort(sizes)
        order = order[np.searchsorted(sizes, c.dry_allowed_length, sorter=order) :]
        places = behind[order].tolist()
        follow = (sequence[at] if at < len(sequence) else path[at - len(sequence)] for at in places)
        longest = dict(zip(follow, sizes[order].tolist(), strict=True))  # the last ones are the longest
        tokens = [token for token in longest if not self._breaks_alone(token)]
        beyond = np.array([longest[token] - c.dry_allowed_length for token in tokens], dtype=np.float64)
        if c.dry_base > 1.000001:
            beyond = np.minimum(beyond, int(_LARGEST_LOG / math.log(c.dry_base)))
        penalties = np.minimum(c.dry_multiplier * c.dry_base**beyond, _MOST)
        return np.array(tokens, dtype=np.int64), penalties.astype(np.float32)

    def _end(self, sequence: Sequence[int], path: tuple[int, ...]) -> _End:
        self._follow(sequence)
        known = len(path)
        while path[:known] not in self._known:
            known -= 1
        text = [*sequence[max(len(sequence) + 1 - self._size, 0) :], *path]
        before = len(text) - len(path)
        keys = [self._key(text[: before + size]) for size in range(1, len(path) + 1)]
        for size in range(known + 1, len(path) + 1):
            key = keys[size - 1]
            in_path = [len(sequence) + at for at in range(1, size) if keys[at - 1] == key]
            behind = np.append(self._earlier(key), np.array(in_path, dtype=np.int64))
            broken = self._is_broken(path[size - 1], backwards(sequence, path[: size - 1]))
            self._known[path[:size]] = self._extended(self._known[path[: size - 1]], behind, broken)
        return self._known[path]

    def _extended(self, end: _End, behind: Tokens, broken: bool) -> _End:
        """The end of a text with one more token.

        Args:
            behind: the positions behind earlier occurrences of its last pair.
        """
        sizes = np.full(len(behind), self._size)
        if len(end.behind):
            before = np.searchsorted(end.behind, behind - 1).clip(max=len(end.behind) - 1)
            sizes = np.where(end.behind[before] == behind - 1, end.sizes[before] + 1, sizes)
        return _End(behind, sizes, 0 if broken else end.unbroken + 1)

    def _follow(self, sequence: Sequence[int]) -> None:
        """Take what the sequence has got since the last call."""
        if len(sequence) == self._length:
            return
        if not 0 < self._length < len(sequence):
            end = self._read(sequence)
        else:
            end = self._known[()]
            for length in range(self._length + 1, len(sequence) + 1):
                key = self._key(sequence[max(length - self._size, 0) : length])
                broken = self._is_broken(sequence[length - 1], _before(sequence, length - 1))
                end = self._extended(end, self._earlier(key), broken)
                self._recent.setdefault(key, []).append(length)
        self._known = {(): end}
        self._length = len(sequence)

    def _read(self, sequence: Sequence[int]) -> _End:
        """Take a sequence that is new, in time that is linear in its length."""
        self._recent = {}
        tokens = np.asarray(sequence, dtype=np.int64)
        keys = tokens if self._size == 1 else (tokens[:-1] << _SHIFT) + tokens[1:]
        order = np.argsort(keys, kind="stable")
        self._keys, self._behind = keys[order], order + self._size
        length = len(sequence)
        alike = np.array(_z_function(sequence[::-1]), dtype=np.int64)[::-1]  # by the last token
        behind = np.flatnonzero(alike >= self._size) + 1
        sizes = alike[behind - 1]
        unbroken, most = 0, min(int(sizes.max(initial=self._size)), length)
        while unbroken < most:
            at = length - unbroken - 1
            if self._is_broken(sequence[at], _before(sequence, at)):
                break
            unbroken += 1
        return _End(behind, sizes, unbroken)

    def _key(self, text: Sequence[int]) -> int:
        """The number of the last pair of a text; -1, which no pair has, if the text is shorter."""
        if len(text) < self._size:
            return -1
        return text[-1] if self._size == 1 else (text[-2] << _SHIFT) + text[-1]

    def _earlier(self, key: int) -> Tokens:
        """The positions behind a pair's occurrences in the sequence."""
        first, behind = np.searchsorted(self._keys, [key, key + 1])
        recent = self._recent.get(key)
        found: Tokens = self._behind[first:behind]
        return found if recent is None else np.append(found, np.array(recent, dtype=np.int64))

    def _is_broken(self, token: int, before: Iterator[int]) -> bool:
        """True if a sequence breaker ends in a token.

        Args:
            before: the tokens before it, the last one first.
        """
        if self._breaks_alone(token):
            return True
        if self._spelling is None or not self._breaker_bytes:
            return False
        begun = self._spelling.ending(before, self._breaker_bytes, control=True)
        text = begun + self._spelling.piece(token, control=True)
        return any(text.find(mark, max(len(begun) - len(mark) + 1, 0)) >= 0 for mark in self._breakers)

    def _breaks_alone(self, token: int) -> bool:
        """True if a token contains a whole sequence breaker."""
        if self._spelling is None or not self._breakers:
            return False
        if token not in self._breaks:
            piece = self._spelling.piece(token, control=True)
            self._breaks[token] = any(mark in piece for mark in self._breakers)
        return self._breaks[token]


def _before(sequence: Sequence[int], end: int) -> Iterator[int]:
    return (sequence[place] for place in range(end - 1, -1, -1))


def _z_function(text: Sequence[int]) -> list[int]:
    """For each position, how many of the tokens from there on are those that the text begins with; 0 at 0."""
    alike = [0] * len(text)
    first = behind = 0  # what lies between repeats the beginning, and reaches furthest
    for at in range(1, len(text)):
        size = min(alike[at - first], behind - at) if at < behind else 0
        while at + size < len(text) and text[size] == text[at + size]:
            size += 1
        alike[at] = size
        if at + size > behind:
            first, behind = at, at + size
    return alike
