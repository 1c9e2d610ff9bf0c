"""Positions of tokens behind images that take fewer positions than rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.llama.cache.positions import Positions, RowSpan
from edgespec.llama.cache.states import BLOCK, block_borders

# Of each image: tokens before it, its rows, and the positions that they take.
IMAGES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 9)), max_size=4)


def spans_of(images: list[tuple[int, int, int]]) -> list[RowSpan]:
    spans: list[RowSpan] = []
    for before, rows, positions in images:
        start = (spans[-1].end if spans else 0) + before
        spans.append(RowSpan(start, rows, min(rows, positions)))
    return spans


@given(IMAGES)
def test_positions_are_those_of_a_walk_over_the_tokens(images: list[tuple[int, int, int]]) -> None:
    spans = spans_of(images)
    length = (spans[-1].end if spans else 0) + 4
    positions = Positions(spans)
    position, index, texts = 0, 0, []
    while index < length:
        span = next((span for span in spans if span.start == index and span.rows != span.positions), None)
        if span is None:
            assert positions.at(index) == position
            assert positions.floor(index) == positions.ceiling(index) == index
            assert positions.behind(index) == position
            texts.append((index, position))
            position, index = position + 1, index + 1
            continue
        for row in range(span.rows):
            assert positions.at(index + row) == position
            if row:
                assert positions.floor(index + row) == span.start
                assert positions.ceiling(index + row) == span.end
                assert positions.behind(index + row) == position + 1
        position, index = position + span.positions, span.end
    indexes, expected = (np.array(column, dtype=np.int32) for column in zip(*texts, strict=True))
    np.testing.assert_array_equal(positions.of(indexes), expected)
    assert bool(positions) == any(span.rows != span.positions for span in spans)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), max_size=4))
def test_no_block_ends_within_an_image(parts: list[tuple[int, int]]) -> None:
    tokens = [token for texts, rows in parts for token in [7] * texts + [-2] * rows]
    end = 0
    for start, end_of_block in block_borders(tokens):
        assert start == end
        end = end_of_block
        assert end == len(tokens) or tokens[end - 1] >= 0 or tokens[end] >= 0
        assert end - start >= BLOCK or end == len(tokens)
        assert end - start == BLOCK or end == len(tokens) or tokens[end - 1] < 0
    assert end == len(tokens)
