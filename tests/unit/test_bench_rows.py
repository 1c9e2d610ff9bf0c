"""Rows that `edgespec bench` measures of a model, and their limits."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.bench.rows.row_spec import RowOptions, RowSpec, rows_for
from edgespec.bench.rows.shared_rows import texts_of
from edgespec.config import Config


def wishes(**changes: Any) -> RowOptions:
    values: dict[str, Any] = {"load": {}, "trees": [16, "auto"]} | changes
    values["load"] = Config.of(**{"model": "big.gguf", "draft": "small.gguf"} | values["load"])
    return RowOptions(**values)


def names(rows: list[RowSpec]) -> list[str]:
    return [row.name for row in rows]


def test_a_model_that_fits_is_measured_in_memory() -> None:
    rows = rows_for(wishes(), fits=True, fits_machine=True)
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
    rows = rows_for(wishes(cap=1000, marks=("widened",)), fits=False, fits_machine=True)
    assert names(rows) == [
        "in memory, plain (widened, no limit)",
        "memory-mapped, plain (widened)",
        "streamed, plain (widened)",
        "streamed, tree 16 (widened)",
        "streamed, tree auto (widened)",
    ]
    assert [row.capped for row in rows] == [False, True, True, True, True]
    assert [row.load.memory.limit for row in rows] == [None, 950, 950, 950, 950]
    assert [row.load.memory.offload for row in rows] == ["none", "mmap", "stream", "stream", "stream"]


def test_experts_are_compared_with_whole_layers() -> None:
    rows = rows_for(wishes(cap=1000, marks=("mixed",)), fits=False, fits_machine=False, experts=True)
    assert names(rows)[:3] == [
        "memory-mapped, plain (mixed)",
        "streamed, plain (mixed, whole layers)",
        "streamed, plain (mixed)",
    ]
    assert [row.load.memory.experts for row in rows[:3]] == ["auto", "never", "auto"]
    assert rows[1].load.memory.limit == rows[2].load.memory.limit == 950


@pytest.mark.parametrize(("cap", "caps"), [(1000, [None, 1000, 2000]), (None, [None, None, None])])
def test_rows_of_more_experts_have_budgets_and_caps_of_their_own(
    cap: int | None, caps: list[int | None]
) -> None:
    options = wishes(
        cap=cap, load={"memory": None if cap else 950}, marks=("mixed",), held={50: 1900, 25: 950}
    )
    rows = rows_for(options, fits=False, fits_machine=False, experts=True)
    assert names(rows)[2:5] == [
        "streamed, plain (mixed)",
        "streamed, plain (mixed, 25 % of the experts)",
        "streamed, plain (mixed, 50 % of the experts)",
    ]
    assert [row.load.memory.limit for row in rows[2:5]] == [950, 950, 1900]
    assert [row.cap for row in rows[2:5]] == caps


def test_memory_that_was_asked_for_goes_before_the_cap() -> None:
    rows = rows_for(wishes(load={"memory": 700}, cap=1000), fits=False, fits_machine=False)
    assert names(rows)[0] == "memory-mapped, plain"
    assert {row.load.memory.limit for row in rows} == {700}


@pytest.mark.parametrize(
    ("offload", "first"),
    [("none", "in memory, plain"), ("mmap", "memory-mapped, plain"), ("stream", "memory-mapped, plain")],
)
def test_a_way_that_was_asked_for(offload: str, first: str) -> None:
    rows = rows_for(wishes(load={"offload": offload}), fits=offload == "stream", fits_machine=False)
    assert names(rows)[0] == first
    assert any(row.place == "stream" for row in rows) == (offload == "stream")


def test_without_drafts_there_are_no_trees() -> None:
    rows = rows_for(wishes(load={"draft": "none", "tree": "chain"}), fits=True, fits_machine=True)
    assert names(rows) == ["in memory, plain"]
    assert rows[0].load.speculation.tree == "calibrated"


def test_rows_of_many_texts() -> None:
    rows = rows_for(wishes(texts=(1, 16)), fits=False, fits_machine=False)
    many = [row for row in rows if row.texts]
    assert names(many) == [
        "streamed, 1 text",
        "streamed, 1 text, tree auto",
        "streamed, 16 texts",
        "streamed, 16 texts, tree auto",
    ]
    assert [row.load.batching.parallel for row in many] == [1, 1, 16, 16]
    assert not many[0].load.speculation.drafts
    alone = rows_for(wishes(texts=(4,), load={"draft": "none"}), fits=True, fits_machine=True)
    assert names(alone) == ["in memory, plain", "in memory, 4 texts"]
    assert texts_of(["a", "b"], 5) == ["a", "b", "a (2)", "b (2)", "a (3)"]
