"""Wraps plain answers between words as they stream, on a terminal where Markdown is not rendered.

Nothing that was written is ever changed, so this also suits terminals that cannot move their cursor: the
word at the end is held back until it is clear whether it fits. Blocks of code, indented text and tables are
left to the terminal, so that they can be copied as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from edgespec.cli.screen.results import ResultStream
from edgespec.printable import printable

_FENCE = re.compile(r"(`{3,}|~{3,})")
_LIST_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])$")
_PIECES = re.compile(r"\n|[^\S\n]+|[^\s]+")
_CODE_INDENT = 4


class WrappingWriter:
    """Takes pieces of an answer and writes them in lines that fit.

    Args:
        results: the terminal.
        columns: its width, asked for at every word, as windows are resized.
    """

    def __init__(self, results: ResultStream, columns: Callable[[], int]) -> None:
        self._results = results
        self._columns = columns
        self._held = ""  # the end of the text, which may be half a word
        self._at_start = True  # nothing but spaces on this line of the text so far
        self._used = 0  # columns used on this line of the screen
        self._space = ""  # before the next word
        self._indent = 0  # of lines that continue this one
        self._fence = ""  # the marks that opened the block of code around here; empty outside of one
        self._as_it_is = False  # this line of the text is not wrapped

    def text(self, text: str) -> None:
        """Take a piece, and write what is complete of it."""
        pieces = _PIECES.findall(self._held + printable(text))
        self._held = ""
        if pieces and pieces[-1] != "\n":
            complete, self._held = _split(pieces.pop())
            pieces += [complete] if complete else []
        written = "".join(map(self._placed, pieces))
        if self._as_it_is or (self._fence and not self._at_start):
            written += self._placed(self._held) if self._held else ""
            self._held = ""
        self._results.text(written)

    def end(self) -> None:
        """Write the rest; the next piece begins another text."""
        held, self._held = self._held, ""
        self._results.text(self._placed(held) if held else "")
        self._at_start, self._used, self._space, self._indent = True, 0, "", 0
        self._fence, self._as_it_is = "", False

    def _placed(self, piece: str) -> str:
        """Return the text to write for a line break, spaces or a word."""
        if piece == "\n":
            self._at_start, self._used, self._space, self._indent = True, 0, "", 0
            self._as_it_is = False
            return "\n"
        if piece.isspace():
            if self._as_it_is or self._fence:
                return piece
            self._space += piece
            return ""
        if self._at_start:
            self._begin_line(piece)
        if self._as_it_is or self._fence:
            space, self._space = self._space, ""
            return space + piece
        return "".join(map(self._word, _breakable(piece)))

    def _begin_line(self, word: str) -> None:
        """Find out what kind of line begins with this word."""
        self._at_start = False
        indent = len(self._space.expandtabs(_CODE_INDENT))
        self._indent = indent + (len(word) + 1 if _LIST_ITEM.match(word) else 0)
        fence = _FENCE.match(word)
        if fence and not self._fence:
            self._fence, self._as_it_is = fence[1], True
        elif fence and word.startswith(self._fence):
            self._fence, self._as_it_is = "", True
        elif indent >= _CODE_INDENT or word.startswith("|"):
            self._as_it_is = True

    def _word(self, word: str) -> str:
        from rich.cells import cell_len

        space, self._space = self._space, ""
        needed = len(space) + cell_len(word)
        # A row that is filled to its last column wraps in a different way on each terminal.
        if self._used and self._used + needed > self._columns() - 1:
            self._used = self._indent + cell_len(word)
            return "\n" + " " * self._indent + word
        self._used += needed
        return space + word


def _breakable(word: str) -> list[str]:
    """The parts of a word between which a line may end: scripts without spaces wrap anywhere."""
    from rich.cells import cell_len

    if word.isascii():
        return [word]
    parts = [""]
    for character in word:
        if cell_len(character) > 1:
            parts += [character, ""]
        else:
            parts[-1] += character
    return [part for part in parts if part]


def _split(word: str) -> tuple[str, str]:
    """Split the end of a text into what can be placed and what the next piece may belong to.

    A word of a script without spaces may be a whole paragraph, so all but its last character can be placed.
    """
    from rich.cells import cell_len

    if word.isascii():
        return "", word
    end = next((i for i in range(len(word) - 1, 0, -1) if cell_len(word[i - 1]) > 1), 0)
    return word[:end], word[end:]
