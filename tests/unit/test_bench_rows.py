"""Rows that `edgespec bench` measures of a model, and their limits."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.bench.rows.figures import RowSpec, rows_for
from edgespec.bench.rows.shared_rows import texts_of
from edgespec.config import Config


def rows_of(texts: tuple[int, ...] = (), marks: tuple[str, ...] = (), **load: Any) -> list[RowSpec]:
    """The rows of a model that fits the machine, but no limit."""
    config = Config.of(**{"model": "big.gguf", "draft": "small.gguf"} | load)
    fits = config.memory.limit is None
    return rows_for(config, [16, "auto"], texts, marks, fits=fits, fits_machine=True)


def names(rows: list[RowSpec]) -> list[str]:
    return [row.name for row in rows]


def test_a_model_that_fits_is_measured_in_memory() -> None:
    rows = rows_of()
    assert names(rows) == ["in memory, plain", "in memory, tree 16", "in memory, tree auto"]
    assert rows[0].load.arguments() == {"model": "big.gguf", "offload": "none", "draft": "none"}
    assert rows[1].load.arguments() == {
        "model": "big.gguf",
        "offload": "none",
        "draft": "small.gguf",
        "tree_budget": 16,
    }
    assert rows[2].load.speculation.tree_budget is None
    assert [row.curve for row in rows] == [True, False, False]


def test_a_model_that_does_not_fit_the_limit_is_streamed() -> None:
    rows = rows_of(memory=1 << 30, marks=("widened",))
    assert names(rows) == [
        "in memory, plain (widened, no limit)",
        "memory-mapped, plain (widened)",
        "streamed, plain (widened)",
        "streamed, tree 16 (widened)",
        "streamed, tree auto (widened)",
    ]
    assert [row.load.memory.limit for row in rows] == [None, *[1 << 30] * 4]
    assert [row.load.memory.offload for row in rows] == ["none", "mmap", "stream", "stream", "stream"]


@pytest.mark.parametrize(
    ("offload", "first"),
    [("none", "in memory, plain"), ("mmap", "memory-mapped, plain"), ("stream", "in memory, plain")],
)
def test_a_way_that_was_asked_for(offload: str, first: str) -> None:
    rows = rows_of(offload=offload)
    assert names(rows)[0] == first
    assert any(row.place == "stream" for row in rows) == (offload == "stream")


def test_without_drafts_there_are_no_trees() -> None:
    rows = rows_of(draft="none", tree="chain")
    assert names(rows) == ["in memory, plain"]
    assert rows[0].load.speculation.tree == "calibrated"


def test_rows_of_many_texts() -> None:
    many = [row for row in rows_of((1, 16), memory=1 << 30) if row.texts]
    assert names(many) == [
        "streamed, 1 text",
        "streamed, 1 text, tree auto",
        "streamed, 16 texts",
        "streamed, 16 texts, tree auto",
    ]
    assert [row.load.batching.parallel for row in many] == [1, 1, 16, 16]
    assert not many[0].load.speculation.drafts
    assert names(rows_of((4,), draft="none")) == ["in memory, plain", "in memory, 4 texts"]
    assert texts_of(["a", "b"], 5) == ["a", "b", "a (2)", "b (2)", "a (3)"]
