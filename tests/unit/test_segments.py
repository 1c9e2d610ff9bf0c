"""Cells of texts, checked against a plain list of cells."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgespec.llama.cache.positions import Positions, RowSpan
from edgespec.llama.cache.segments import Segments

PART = 5


class Text:
    """Stands for a text, of which some rows have one position."""

    def __init__(self, spans: list[RowSpan]) -> None:
        self.length = 0
        self.spans = spans
        self.positions = Positions(spans)


class Cells(RuleBasedStateMachine):
    """A list of cells in order, each a position and the texts that hold it, beside the segments."""

    @initialize()
    def begin(self) -> None:
        self.segments = Segments()
        self.cells: list[tuple[int, set[Text]]] = []
        self.texts: list[Text] = [
            Text([]),
            Text([RowSpan(2, 4, 2)]),
            Text([RowSpan(1, 7, 3), RowSpan(8, 3, 1)]),
        ]

    def pick(self, data: st.DataObject) -> Any:
        return data.draw(st.sampled_from(self.texts))

    @rule(data=st.data(), count=st.integers(0, 4))
    def append(self, data: st.DataObject, count: int) -> None:
        text = self.pick(data)
        self.segments.add(text, text.length, text.length + count)
        self.cells += [(text.length + n, {text}) for n in range(count)]
        text.length += count

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        text = self.pick(data)
        text.length = text.positions.floor(data.draw(st.integers(0, text.length)))
        self.segments.truncate(text, text.length)
        for position, holders in self.cells:
            if position >= text.length:
                holders.discard(text)
        self.cells = [cell for cell in self.cells if cell[1]]

    @precondition(lambda self: len(self.texts) < 7)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source: Any = self.pick(data)
        text: Any = Text(source.spans)
        text.length = source.positions.floor(data.draw(st.integers(0, source.length)))
        self.segments.share(source, text, text.length)
        for position, holders in self.cells:
            if position < text.length and source in holders:
                holders.add(text)
        self.texts.append(text)

    @rule()
    def compact(self) -> None:
        """Move all parts, and check that each finds the cells in the order in which each text needs them."""
        moved: list[tuple[int, set[Any]]] = []
        for part in self.segments.parts_to_move(PART):
            assert sum(map(len, part)) <= PART or any(text.spans for s in part for text in s.holders)  # type: ignore[attr-defined]
            for stretch in part:
                # llama.cpp moves what a sequence has at these positions.
                first, behind = stretch.positions
                for text in stretch.holders:
                    mine = [n for n, holders in self.cells if text in holders]
                    at = [n for n in mine if first <= text.positions.at(n) < behind]
                    assert at == list(range(stretch.start, stretch.end))
            moved += [(n, set(s.holders)) for s in part for n in range(s.start, s.end)]
        kept = self.cells[: len(self.cells) - len(moved)]
        # What is not moved is what comes first, so the moved cells follow it directly.
        assert sorted(map(_key, moved)) == sorted(map(_key, self.cells[len(kept) :]))
        self.cells = kept + moved

    @invariant()
    def each_text_has_its_positions_in_order(self) -> None:
        if not hasattr(self, "segments"):
            return
        assert self.segments.n_cells == len(self.cells)
        for text in self.texts:
            mine = [n for s in self.segments if text in s.holders for n in range(s.start, s.end)]  # type: ignore[operator]
            assert mine == [n for n, holders in self.cells if text in holders] == list(range(text.length))


def _key(cell: tuple[int, set[Any]]) -> tuple[int, list[int]]:
    return cell[0], sorted(map(id, cell[1]))


TestCells = Cells.TestCase
TestCells.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
