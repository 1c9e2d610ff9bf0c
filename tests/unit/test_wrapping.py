"""Plain answers in a narrow window: lines fit, code stays as it is, and nothing depends on the pieces."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.wrapping import WrappingWriter

COLUMNS = 20


def wrapped(pieces: Iterable[str], columns: Callable[[], int] = lambda: COLUMNS) -> str:
    file = io.StringIO()
    writer = WrappingWriter(ResultStream(file, "it"), columns)
    for piece in pieces:
        writer.text(piece)
    writer.end()
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The sky is blue because of light.", ["The sky is blue", "because of light."]),
        ("- one two three four five six", ["- one two three", "  four five six"]),
        ("12. one two three four five", ["12. one two three", "    four five"]),
        ("a\n\n  b", ["a", "", "  b"]),
        ("Antidisestablishmentarianism is long", ["Antidisestablishmentarianism", "is long"]),
        ("天空是蓝色的因为光的散射很多", ["天空是蓝色的因为光", "的散射很多"]),
        ("| a | table that is wider than that |", ["| a | table that is wider than that |"]),
        ("    x = indented_code(with_words, and_more)", ["    x = indented_code(with_words, and_more)"]),
    ],
)
def test_where_lines_end(text: str, lines: list[str]) -> None:
    assert wrapped([text]).split("\n") == lines


def test_blocks_of_code_are_untouched() -> None:
    code = "```python\nx = a_long_name + another_long_name  # and words\n\n    y = 1\n```"
    text = f"Some words before the block of code\n{code}\nand some words after the block"
    assert code in wrapped([text])
    assert code in wrapped(text)
    assert wrapped([text]).endswith("```\nand some words\nafter the block")


def test_a_window_that_is_resized_counts_from_the_next_word() -> None:
    widths = iter([40] * 5 + [12] * 50)
    assert wrapped(["one two three four five six seven eight nine"], lambda: next(widths)).split("\n") == [
        "one two three four five six",
        "seven eight",
        "nine",
    ]


def test_scripts_without_spaces_are_written_as_they_come() -> None:
    file = io.StringIO()
    writer = WrappingWriter(ResultStream(file, "it"), lambda: COLUMNS)
    for character in "天空是蓝色的因为光的散射很多":
        writer.text(character)
    assert file.getvalue() == "天空是蓝色的因为光\n的散射很"


TEXTS = st.text(alphabet="ab ab`-1.\n|天", max_size=80)


@given(TEXTS, st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(deadline=None)
def test_the_pieces_do_not_matter(text: str, sizes: list[int]) -> None:
    pieces, at, n = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[n % len(sizes)]])
        at, n = at + len(pieces[-1]), n + 1
    assert wrapped(pieces) == wrapped([text])


def test_what_begins_a_line_is_known_from_the_whole_word() -> None:
    text = "-天 one two three four five"
    assert wrapped(text) == wrapped([text]) == "-天 one two three\nfour five"


@given(TEXTS)
@settings(deadline=None)
def test_nothing_but_line_breaks_is_added_and_lines_fit(text: str) -> None:
    shown = wrapped([text])
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    if not re.search(r"[`|]| {4}", text):
        for line in shown.split("\n"):
            assert cell_len(line) < COLUMNS or len(line.split()) == 1 or line.split()[0] in "-1."
