"""Splitting long texts into chunks for the tokenizer, at places where it ends a word anyway.

llama.cpp splits a text into words by regular expressions, most of them with std::regex, which recurses for
every character: 27 kB of letters without a space overflow a stack of 8 MiB. Some expressions also scan the
rest of a run from each of its characters. So the tokenizer gets a few thousand characters at a time.

A text is split where every pre-tokenizer of llama.cpp ends a word whatever the context, so that the tokens
are
those of the whole text: after a single line break, between two words, before a comma. Where thousands of
characters have no such place, as in a run of one character, it is split between kinds of characters, or after
a fixed number of them; the tokens next to that split may then differ from those of the whole text. They may
also differ for the few pre-tokenizers whose words reach across spaces (superbpe, exaone-moe).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

MAX_CHARS = 4096
_LONGEST_RUN = 1024  # of digits or of whitespace

_LONG_RUN = re.compile(rf"(?<!\s)\s{{{_LONGEST_RUN + 1},}}|(?<!\d)\d{{{_LONGEST_RUN + 1},}}")
_LETTER = r"[^\W\d_]"
# A text is split after a match. The first three are ends of words for llama.cpp.
_SPLITS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\S\n(?={_LETTER})",
        rf"{_LETTER}(?= {_LETTER})",
        r"[^\W_](?=[.,!?…。，、।۔،])",  # noqa: RUF001
        r"[^\W_](?=[^\w\s'’])",  # noqa: RUF001
        rf"{_LETTER}(?=\d)",
        r"\S(?=\s)",
    )
)


def split(text: str, joined: Container[str] = ()) -> Iterator[str]:
    """The chunks of a text, of at most MAX_CHARS characters each; joined, they are the text.

    Args:
        joined: pairs of characters not to be split if possible, because they occur in tokens that llama.cpp
            looks for before it splits the text into words.
    """
    start = 0
    for run in _LONG_RUN.finditer(text):
        for end in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield from _chunks(text, start, end, joined)
            start = end
    yield from _chunks(text, start, len(text), joined)


def _chunks(text: str, start: int, end: int, joined: Container[str]) -> Iterator[str]:
    while end - start > MAX_CHARS:
        at = _split_point(text, start, start + MAX_CHARS, joined)
        yield text[start:at]
        start = at
    if start < end:
        yield text[start:end]


def _split_point(text: str, start: int, end: int, joined: Container[str]) -> int:
    """The last place before `end` to split at, of the best kind that occurs."""
    for pattern in _SPLITS:
        # Lookahead needs one character more than the chunk may have.
        places = [match.end() for match in pattern.finditer(text, start, end + 1)]
        for at in reversed(places):
            if start < at < end and text[at - 1 : at + 1] not in joined:
                return at
    return end
