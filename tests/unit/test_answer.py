"""The end of an answer, and what counts as part of it."""

from __future__ import annotations

import pytest

from edgespec.engine.answer import AnswerBuilder
from edgespec.generation.result import Generation

END = 99


class Letters:
    """Tokens 0, 1, 2, ... are the letters a, b, c, ..."""

    def is_end(self, token: int) -> bool:
        return token == END

    def piece(self, token: int) -> bytes:
        return bytes([97 + token])


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "own", "count"),
    [
        ([0, 1, 2], (), "abc", 3, 3),
        ([0, 1, END, 2, 2], (), "ab", 2, 3),  # the end token is the third, and nothing follows it
        ([END, 1, 2], (), "", 0, 1),
        ([0, 1, 2, 3], ("bc",), "a", 3, 3),  # a stop string's tokens are counted, those behind are not
        ([0, 1, 2, END], ("bc",), "a", 3, 3),
    ],
)
def test_nothing_behind_the_end_is_counted(
    tokens: list[int], stop: tuple[str, ...], text: str, own: int, count: int
) -> None:
    answer = Generation()
    builder = AnswerBuilder(answer, Letters(), stop)  # type: ignore[arg-type]
    said = builder.feed(tokens).text + builder.finish("length").text
    assert said == answer.text == text
    assert len(answer.tokens) == own
    assert builder.count == count
