"""Markdown that is shown while it is written: the screen is right at the end, and never blinks on the way."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from functools import cache

import pyte
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.cli.screen.markdown import MarkdownWriter, last_block
from edgespec.cli.screen.results import ResultStream

COLUMNS, LINES = 40, 12

DOCUMENT = """\
# Apples

An apple is a *round* fruit,
and **very** good for you; `code` too.

- one
- two
  - deep

1. first
2. second

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 2 |

<b>no HTML</b> here. The end
"""


class Screen(io.StringIO):
    """A terminal that is looked at after every character."""

    def __init__(self, lines: int = LINES) -> None:
        super().__init__()
        self._screen = pyte.HistoryScreen(COLUMNS, lines, history=1000, ratio=1)
        self._stream = pyte.Stream(self._screen)
        self.blinked: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        before = self._filled()
        states = []
        for character in text.replace("\n", "\r\n"):
            self._stream.feed(character)
            states.append(self._filled())
        if states and min(states) < min(before, states[-1]):
            self.blinked.append(text)
        return len(text)

    def _filled(self) -> int:
        above = len(self._screen.history.top)
        written = (line.values() for line in self._screen.buffer.values())
        return above + sum(any(cell.data.strip() for cell in cells) for cells in written)

    def text(self) -> list[str]:
        """Every line, those that have left the screen included."""
        above = ["".join(line[x].data for x in range(COLUMNS)) for line in self._screen.history.top]
        lines = [line.rstrip() for line in [*above, *self._screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def shown(pieces: Iterator[str] | list[str], lines: int = LINES) -> Screen:
    screen = Screen(lines)
    writer = MarkdownWriter(ResultStream(screen, "it"), lambda: os.terminal_size((COLUMNS, lines)))
    for piece in pieces:
        writer._busy_until = 0.0  # draw every piece, however fast they come
        writer.text(piece)
    writer.end()
    return screen


@cache
def whole_document() -> list[str]:
    """The lines of the document when it comes in one piece."""
    return shown([DOCUMENT], lines=60).text()


def cut(text: str, sizes: list[int]) -> Iterator[str]:
    at = 0
    while at < len(text):
        size = sizes[at % len(sizes)]
        yield text[at : at + size]
        at += size


def test_what_markdown_looks_like() -> None:
    assert whole_document() == [
        "Apples",
        "",
        "An apple is a round fruit,",
        "and very good for you; code too.",
        "",
        " • one",
        " • two",
        "    • deep",
        "",
        " 1 first",
        " 2 second",
        "",
        "def f(x):",
        "    return x",
        "",
        " a  b",
        " ────",
        " 1  2",
        "",
        "<b>no HTML</b> here. The end",
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7))
@settings(max_examples=8, deadline=None)
def test_pieces_end_up_as_the_whole_does(sizes: list[int]) -> None:
    screen = shown(cut(DOCUMENT, sizes))
    assert screen.text() == whole_document()
    assert screen.blinked == []


@given(
    st.text(alphabet="ab *_`#->1.|~\n[]()", max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=5)
)
@example("a\n-", [1])
@settings(max_examples=30, deadline=None)
def test_any_text_is_shown_without_a_failure(text: str, sizes: list[int]) -> None:
    letters = [c for line in shown(cut(text, sizes)).text() for c in line if c in "ab"]
    assert len(letters) <= text.count("a") + text.count("b")


def test_a_block_taller_than_the_screen() -> None:
    code = "```\n" + "".join(f"line {i}\n" for i in range(40)) + "```\n"
    screen = shown(cut(code, [3, 5, 8]))
    assert screen.text() == [f"line {i}" for i in range(40)]


def test_code_copied_from_the_screen_runs() -> None:
    screen = shown(cut("So:\n\n```python\nfor i in range(3):\n    total += i\n```\n\nDone.", [4, 9]))
    scope = {"total": 0}
    exec("\n".join(screen.text()[2:-2]), scope)
    assert scope["total"] == 3


def test_long_lines_of_code_are_left_to_the_terminal() -> None:
    long = "x" * (2 * COLUMNS - 2) + " = " + "y" * 9
    code = f"```\n{long}\nz = 1\n```\n\nwords " + "after " * 9
    screen = shown(cut(code, [3, 5, 8]))
    assert "".join(screen.text()[:3]) == long
    assert screen.text() == shown([code], lines=60).text()
    assert screen.text()[3] == "z = 1"
    assert max(map(len, screen.text()[5:])) < COLUMNS


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("One.\n\nTwo\nthree", "Two\nthree"),
        ("One.\n\n```py\nx = 1\n\ny =", "```py\nx = 1\n\ny ="),
        ("```\nx\n```\nAfter it", "After it"),
        ("", ""),
    ],
)
def test_what_an_answer_continues_with(text: str, end: str) -> None:
    assert last_block(text) == end


def test_a_model_cannot_steer_the_screen() -> None:
    assert shown(["a\x1b[2Jb"]).text() == ["a\ufffd[2Jb"]
