"""Decoding of token bytes to text that is safe to show: whole characters, and no part of a stop string.

A token may end inside a UTF-8 character, and a stop string may span tokens. `TextStream` returns
each piece of text as soon as it is certain, and examines every character once, however long the
text becomes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns pushed bytes into text, up to the first stop string.

    All that `push` and `flush` return, joined, is the decoded text cut where the earliest stop
    string starts (earliest by its start, not by its end; where two start at the same place the cut
    is the same). Bytes that are not valid UTF-8 become U+FFFD, except those of an unfinished character at the
    end, which are dropped. Empty stop strings are ignored.

    Attributes:
        stopped: a stop string was found; nothing more is returned. With several stop strings
            this can come a few characters after the first whole one, while an earlier start may
            still grow into another.
        stop_string: the stop string that was found, once `stopped`.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self.stop_string = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop) if text]
        self._held = ""  # decoded, but perhaps part of a stop string
        self._held_from = 0  # where `_held` begins, in characters since the start of the text
        self._scanned = 0  # characters the matchers have seen
        self._cut: int | None = None  # earliest start of a whole stop string so far

    def push(self, data: bytes) -> str:
        """Take the next bytes; return the text that has become certain, often "" or a word."""
        if self.stopped:
            return ""
        return self._accept(self._decode(data))

    def flush(self) -> str:
        """End the text: return what was held back, without the bytes of an unfinished character."""
        if self.stopped:
            return ""
        return self._release(self._scanned) if self._cut is None else self._stop(self._cut)

    def _accept(self, text: str) -> str:
        if not self._matchers:
            return text
        self._held += text
        for character in text:
            self._scanned += 1
            for matcher in self._matchers:
                if matcher.advance(character):
                    start = self._scanned - matcher.length
                    if self._cut is None or start < self._cut:
                        self._cut, self.stop_string = start, matcher.pattern
            if self._cut is not None and self._cut <= self._undecided():
                return self._stop(self._cut)
        certain = self._undecided()
        return self._release(certain if self._cut is None else min(certain, self._cut))

    def _undecided(self) -> int:
        """Find where the longest beginning of a stop string starts, among those still open."""
        return self._scanned - max(matcher.matched for matcher in self._matchers)

    def _release(self, end: int) -> str:
        count = end - self._held_from
        text, self._held = self._held[:count], self._held[count:]
        self._held_from = end
        return text

    def _stop(self, cut: int) -> str:
        self.stopped = True
        text = self._release(cut)
        self._held = ""
        return text


class _Matcher:
    """Knuth-Morris-Pratt search for one string, a character at a time.

    Attributes:
        pattern: the string.
        length: its characters.
        matched: the longest beginning of the string that the text so far ends with (the whole
            string excepted).
    """

    def __init__(self, pattern: str) -> None:
        self.length = len(pattern)
        self.matched = 0
        self.pattern = pattern
        # _fallback[n]: the longest proper suffix of pattern[:n] that is also its beginning.
        self._fallback = [0] * (len(pattern) + 1)
        for end in range(1, len(pattern)):
            self._fallback[end + 1] = self._extend(self._fallback[end], pattern[end])

    def advance(self, character: str) -> bool:
        """Take one character; True if the text now ends with the whole string."""
        self.matched = self._extend(self.matched, character)
        if self.matched < self.length:
            return False
        self.matched = self._fallback[self.length]
        return True

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched]
        return matched + (self.pattern[matched] == character)
