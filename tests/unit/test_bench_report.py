"""Output of `edgespec bench`: tables, documents and pages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.report.compare import compare_files
from edgespec.bench.report.document import check_writable, make_document, write_whole
from edgespec.bench.report.page import make_page
from edgespec.bench.report.row_tables import format_rows
from edgespec.bench.rows.figures import (
    DiskSpeed,
    Row,
    spread,
)
from edgespec.bench.rows.runner import BenchMeasurements
from edgespec.errors import OutputError, UsageError

ROWS = [
    Row(
        "streamed, plain (widened)",
        "stream",
        "none",
        marks=("widened",),
        **spread([2.0, 2.25]),
        tokens_per_pass=1.0,
        nodes_per_pass=1.0,
        round_s=0.47,
        pass_s=0.46,
        draft_s=0.0,
        wait_s=0.2,
        rows={8: 10},
        streamed_bytes_per_pass=1_200_000_000,
        disk_share=0.981,
        peak_rss_bytes=900_000_000,
        exact=True,
        identical=True,
        answers=[[1, 2]],
    ),
    Row(
        "streamed, tree 16 (widened)",
        "stream",
        16,
        marks=("widened",),
        **spread([4.0]),
        tokens_per_pass=4.0,
        nodes_per_pass=15.5,
        round_s=1.0,
        pass_s=0.8,
        draft_s=0.1,
        wait_s=0.0,
        rows={16: 10},
        identical=False,
        promised=True,
        exact=True,
        cut=True,
        answers=[[1, 3]],
    ),
    Row("memory-mapped, plain (widened)", "mmap", "none", error="Killed: <out> of memory."),
]
ABOUT: dict[str, Any] = {
    "title": "edgespec bench: small & <wide>",
    "date": "2026-01-01T00:00:00+00:00",
    "command": "edgespec bench --html 'a b.html'",
    "asked": "2 prompts, once, at most 16 tokens each, greedy",
    "machine": {"cpu": "A CPU", "cores": 2, "memory_bytes": 2**34, "disk": None, "system": "Linux"},
    "versions": {"edgespec": "0.1.0", "llama-cpp-python": "0.3.36", "python": "3.11.0"},
    "model": {"name": "small-20G", "path": "/m.gguf", "bytes": 2**30, "widened_from": "s.gguf"},
    "draft": "small.gguf",
    "settings": {"prompts": 2, "max_tokens": 16, "temperature": 0.0, "memory_bytes": 2**29},
    "notes": ["A card is left out."],
}


def measured() -> BenchMeasurements:
    curve = {1: 0.45, 16: 0.5, 32: 0.9}
    passes = {rows: {"s": seconds, "wait_s": seconds / 4} for rows, seconds in curve.items()}
    return BenchMeasurements(
        [replace(row) for row in ROWS], {"stream": passes}, DiskSpeed("/m.pack", [2e9, 2.2e9])
    )


def test_markdown() -> None:
    lines = format_rows(ROWS).splitlines()
    assert lines[0].split("|")[1:-1] == [
        f" {'row':<30} ",
        f" {'tokens/s':>16} ",
        " tokens ",
        " nodes ",
        " pass s ",
        " draft s ",
        " read MiB ",
        " disk ",
        " peak MiB ",
        " identical ",
    ]
    assert len({len(line) for line in lines[:5]}) == 1
    assert "| 2.12 (2.00-2.25) |" in lines[2]
    assert "1144 |  98% |      858 |       yes |" in lines[2]
    assert "4.00* |   4.00 |" in lines[3]
    assert lines[3].endswith("|        NO |")
    assert "|           failed |" in lines[4]
    assert lines[5:] == [
        "",
        "memory-mapped, plain (widened) failed: Killed: <out> of memory.",
        "* cut off by --row-seconds.",
    ]


@pytest.mark.parametrize("columns", [80, 100])
def test_a_table_that_is_too_wide_continues_below(columns: int) -> None:
    lines = format_rows(ROWS, columns).splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert max(map(len, tables)) <= columns
    titles = [line.split("|")[1:-1] for line in tables if "| row " in line]
    assert len(titles) > 1
    whole = format_rows(ROWS).splitlines()[0].split("|")[2:-1]
    assert [title.strip() for row in titles for title in row[1:]] == [title.strip() for title in whole]
    assert lines[-2:] == format_rows(ROWS).splitlines()[-2:]


def test_the_document_has_the_knee_and_names_bugs() -> None:
    document = make_document(measured(), ABOUT)
    assert document["curves"]["stream"]["knee"] == 16
    assert document["disk"]["bytes_per_s"] == [2e9, 2.2e9]
    assert document["rows"][0]["rows"] == {"8": 10}
    assert "answers" not in document["rows"][0]
    assert document["notes"][0] == "A card is left out."
    assert document["notes"][-1].startswith("streamed, tree 16 (widened) is exact, but its answers differ")


class PageReader(HTMLParser):
    """Elements that are open, and everything a browser would fetch."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.scripts = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script" or any(name.startswith("on") for name, _ in attrs)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#"):
                self.fetched.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = make_page(ROWS, make_document(measured(), ABOUT))
    page = PageReader()
    page.feed(text)
    page.close()
    assert page.open == []
    assert (page.fetched, page.scripts) == ([], 0)
    assert not re.search(r"@import|url\(", text)
    assert text.count("<svg") == 1
    assert "streamed, knee at 16 rows" in page.text
    for shown in (
        "small & <wide>",
        "<out> of memory",
        "edgespec bench --html 'a b.html'",
        "1.9 GiB/s and 2.0 GiB/s before and after",
    ):
        assert shown in page.text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_a_page_of_nothing_but_failures() -> None:
    rows = [Row("a", "memory", "none", error="no")]
    text = make_page(rows, make_document(BenchMeasurements(rows), ABOUT))
    assert "No row worked." in text
    assert "<svg" not in text
    assert "Interrupted" in make_page([], make_document(BenchMeasurements(interrupted=True), ABOUT))


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_whole(path, "one")
    assert path.read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.json"]
    with pytest.raises(OutputError, match="there is no folder"):
        check_writable(tmp_path / "none" / "bench.json")
    with pytest.raises(OutputError, match="is a folder"):
        check_writable(tmp_path)
    check_writable(path)
    assert path.read_text() == "one"


def test_two_documents_are_compared_row_by_row(tmp_path: Path) -> None:
    document = make_document(measured(), ABOUT)
    faster = json.loads(json.dumps(document))
    faster["rows"][0]["tokens_per_second"] *= 2
    for name, content in (("a", document), ("b", faster)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    said = compare_files(str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert re.search(r"streamed, plain \(widened\) +\| 2\.12 +\| 4\.25 +\| 2\.00x", said)
    assert re.search(r"processor +\| A CPU, 2 cores +\| the same", said)
    with pytest.raises(UsageError, match="Cannot compare"):
        compare_files(str(tmp_path / "a.json"), None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', "[" * 9999])
def test_other_files_are_not_compared(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"a\.json is not a document of 'edgespec bench --json'"):
        compare_files(str(path), str(path))
