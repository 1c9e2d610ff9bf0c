"""Renders Markdown on a terminal while it is being generated.

The text is split into its top-level blocks. Complete blocks are printed once and never touched again.
The last one is redrawn as it grows, but only from the first line that differs, and each line is overwritten
in place before its rest is erased, so that nothing flickers. Lines that have scrolled off the top stay as
they are.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgespec.cli.screen.results import ResultStream
from edgespec.printable import printable

if TYPE_CHECKING:
    from markdown_it.token import Token

# The share of the time that drawing may take.
_SHARE = 0.2
# A last line that may still become a list, a rule, a heading or a fence.
_UNDECIDED = re.compile(r"[ \t]*(?:(?:[-*+_=#>`~|:]+|\d{1,9}[.)]?)[ \t]*)?")
_TRAILING_SPACE = re.compile(r"(?<! ) +((?:\x1b\[[0-9;]*m)*)$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class MarkdownWriter:
    """Takes pieces of Markdown and keeps the screen up to date.

    Args:
        results: the terminal.
        size: its columns and lines.
    """

    def __init__(self, results: ResultStream, size: Callable[[], os.terminal_size]) -> None:
        self._results = results
        self._size = size
        self._open = ""  # the text of the incomplete block, including the end that is held back
        self._drawn: list[str] = []  # its lines on the screen, above the cursor
        self._columns = 0  # the width they were drawn for
        self._printed = False  # there is a block above
        self._busy_until = 0.0
        self._parser: Any = None

    def text(self, text: str) -> None:
        """Take a piece and show it soon."""
        self._open += printable(text)
        if time.monotonic() >= self._busy_until:
            start = time.monotonic()
            self._draw(self._open[: _certain(self._open)])
            now = time.monotonic()
            self._busy_until = now + (now - start) * (1 / _SHARE - 1)

    def end(self) -> None:
        """Show everything; the next piece begins another text."""
        self._draw(self._open, final=True)
        self._open, self._drawn, self._printed = "", [], False

    def _draw(self, text: str, *, final: bool = False) -> None:
        tokens = self._parse(text if final else _closed(text))
        starts = [t.map[0] for t in tokens if t.map and t.level == 0 and t.nesting >= 0]
        if len(starts) > 1:
            # Everything before the last block is complete. Parse it again without the closing marks of the
            # last.
            lines = [f"{line}\n" for line in text.split("\n")]
            lines[-1] = lines[-1][:-1]
            for start, end in zip([0, *starts[1:]], starts[1:], strict=False):
                self._show(self._parse("".join(lines[start:end])))
                self._drawn, self._printed = [], self._printed or bool(self._drawn)
            rest = "".join(lines[starts[-1] :])
            self._open = rest + self._open[len(text) :]
            tokens = self._parse(rest if final else _closed(rest))
        if tokens:
            self._show(tokens)

    def _show(self, tokens: list[Token]) -> None:
        """Update the open block on the screen."""
        columns, rows = self._size()
        lines = self._lines(tokens, max(columns - 1, 10))
        if self._printed and lines:
            lines.insert(0, "")
        if columns != self._columns and self._drawn:
            # The width has changed: the terminal has wrapped the old lines in its own way.
            same = 0
        else:
            same = next(
                (i for i, (a, b) in enumerate(zip(self._drawn, lines, strict=False)) if a != b),
                min(len(self._drawn), len(lines)),
            )
            # What has scrolled off cannot be redrawn.
            same = min(max(same, _first_visible(self._drawn, columns, rows - 2)), len(lines))
        up = sum(_rows(line, columns) for line in self._drawn[same:])
        self._columns = columns
        if up or len(lines) > same:
            move = f"\x1b[{min(up, rows - 1)}A\r" if up else ""
            shown = "".join(_written(line, columns) for line in lines[same:])
            self._results.raw(f"{move}{shown}\x1b[J" if up else shown)
        self._drawn = lines

    def _parse(self, text: str) -> list[Token]:
        if self._parser is None:
            from markdown_it import MarkdownIt

            # HTML is shown as text: nothing renders it here, and it must not vanish.
            self._parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
        tokens: list[Token] = self._parser.parse(text)
        for token in tokens:
            for child in token.children or ():
                if child.type == "softbreak":  # line breaks in poems are intended
                    child.type = "hardbreak"
        return tokens

    def _lines(self, tokens: list[Token], columns: int) -> list[str]:
        from rich.console import Console

        document = _document(tokens)
        file = io.StringIO()
        console = Console(
            file=file, force_terminal=True, width=columns, highlight=False, legacy_windows=False
        )
        console.print(document, crop=False)  # long lines of code are left to the terminal
        lines = [_TRAILING_SPACE.sub(r"\1", line) for line in file.getvalue().split("\n")]
        # Rich adds space around some blocks, and one line between blocks is enough.
        filled = [i for i, line in enumerate(lines) if _ESCAPES.sub("", line).strip()]
        return lines[filled[0] : filled[-1] + 1] if filled else []


def _document(tokens: list[Token]) -> Any:
    """Parsed Markdown for Rich: headings on the left, code in the terminal's colours."""
    from rich.cells import cell_len
    from rich.markdown import CodeBlock, Heading, Markdown
    from rich.syntax import Syntax

    class LeftHeading(Heading):
        LEVEL_ALIGN = {"h1": "left"}  # noqa: RUF012

    class PlainCode(CodeBlock):
        """Code as it is, at the left margin: copied from the screen, it runs."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            code = str(self.text).rstrip()
            width = max(options.max_width, *map(cell_len, code.expandtabs(4).split("\n")))
            syntax = Syntax(code, self.lexer_name, theme=self.theme)
            yield from console.render(syntax, options.update(width=width, max_width=width))

    class Document(Markdown):
        elements = {  # noqa: RUF012
            **Markdown.elements,
            "heading_open": LeftHeading,
            "fence": PlainCode,
            "code_block": PlainCode,
        }

    document = Document("", code_theme="ansi_dark", hyperlinks=False)
    document.parsed = tokens
    return document


def _certain(text: str) -> int:
    """Return the length of the text that can be shown without having to be undone."""
    line = text.rfind("\n")
    return max(line, 0) if _UNDECIDED.fullmatch(text, line + 1) else len(text)


def _closed(text: str) -> str:
    """The text with an open code span or bold passage at its end closed."""
    paragraph = text.rpartition("\n\n")[2]
    if "```" in text:  # stars and ticks may be part of code
        return text
    if paragraph.count("`") % 2:
        return text + "`"
    bare = re.sub(r"`[^`]*`", "", paragraph)
    if bare.count("**") % 2 and not text.endswith(("*", " ", "\n")):
        return text + "**"
    return text


def last_block(text: str) -> str:
    """The end of a text that what follows may belong to: its last paragraph, or an open block of code."""
    start = 0
    fence = ""
    blank = True
    for line in re.finditer(r"[^\n]*\n?", text):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line[0])
        if fence:
            if mark and mark[1].startswith(fence):
                fence, blank = "", True
            continue
        if mark:
            fence, start = mark[1], line.start()
        elif line[0] and blank:
            start = line.start()
        blank = not line[0].strip()
    return text[start:]


def _written(line: str, columns: int) -> str:
    """A line as it is written; what was there before is erased, unless the line fills its last row."""
    from rich.cells import cell_len

    cells = cell_len(_ESCAPES.sub("", line))
    full = cells > 0 and cells % columns == 0  # erasing would then take the last character
    return f"{line}\n" if full else f"{line}\x1b[K\n"


def _first_visible(lines: list[str], columns: int, rows: int) -> int:
    """The first of the lines above the cursor that is whole within the last rows of the screen."""
    for at in reversed(range(len(lines))):
        rows -= _rows(lines[at], columns)
        if rows < 0:
            return at + 1
    return 0


def _rows(line: str, columns: int) -> int:
    from rich.cells import cell_len

    return max(-(-cell_len(_ESCAPES.sub("", line)) // columns), 1)
