"""Long texts cut into pieces for the tokenizer, where it cuts them anyway.

llama.cpp splits a text into words by regular expressions, most of them with std::regex, which recurses once a
character: 27 kB of letters without a space overflow a stack of 8 MiB. Some expressions also look at the rest
of a run from each of its characters. So the tokenizer gets a few thousand characters at a time.

A text is cut where every pre-tokenizer of llama.cpp ends a word whatever stands around, so that the tokens
are those of the whole text: behind a single line break, between two words, before a comma. Where thousands of
characters have no such place, as in a run of one character, it is cut between kinds of characters, or after a
number of them; the tokens next to that cut may differ from those of the whole text. They also may for the few
pre-tokenizers whose words reach across spaces (superbpe, exaone-moe), next to a cut between words.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

MOST_CHARS = 4096
_LONGEST_RUN = 1024  # of digits or of whitespace

_LONG_RUN = re.compile(rf"\s{{{_LONGEST_RUN + 1},}}|\d{{{_LONGEST_RUN + 1},}}")
_LETTER = r"[^\W\d_]"
# Cuts lie behind a match. The first three are ends of words for llama.cpp.
_CUTS = tuple(
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


def cut(text: str, joined: Container[str] = ()) -> Iterator[str]:
    """The pieces of a text, at most MOST_CHARS characters each; joined they are the text.

    Args:
        joined: pairs of characters that are not cut apart where that can be helped, as they stand in tokens
            that are found before words are.
    """
    start = 0
    for run in _LONG_RUN.finditer(text):
        for end in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield from _cut(text, start, end, joined)
            start = end
    yield from _cut(text, start, len(text), joined)


def _cut(text: str, start: int, end: int, joined: Container[str]) -> Iterator[str]:
    while end - start > MOST_CHARS:
        at = _last_cut(text, start, start + MOST_CHARS, joined)
        yield text[start:at]
        start = at
    if start < end:
        yield text[start:end]


def _last_cut(text: str, start: int, end: int, joined: Container[str]) -> int:
    """The last place before `end` for a cut of the best kind that there is."""
    for pattern in _CUTS:
        # Looking ahead needs the character behind the last one that may be cut off.
        places = [match.end() for match in pattern.finditer(text, start, end + 1)]
        for at in reversed(places):
            if start < at < end and text[at - 1 : at + 1] not in joined:
                return at
    return end
