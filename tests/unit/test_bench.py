"""`edgespec bench`: questions, rows, arithmetic, what is printed, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.report import plots
from edgespec.bench.report.document import check_writable, make_document, write_whole
from edgespec.bench.report.page import make_page
from edgespec.bench.report.tables import format_rows
from edgespec.bench.rows import capped, llamacpp
from edgespec.bench.rows.capped import Capped, Killable, run_capped
from edgespec.bench.rows.figures import (
    Disk,
    Row,
    at,
    broken_promises,
    fill_identical,
    fill_shares,
    knee,
    spread,
)
from edgespec.bench.rows.job import context_for
from edgespec.bench.rows.llamacpp_batches import LlamaCppBatches
from edgespec.bench.rows.row_spec import RowOptions, RowSpec, rows_for
from edgespec.bench.rows.runner import Measured, RunConfig, Runner, why_it_failed
from edgespec.bench.rows.shared_rows import texts_of
from edgespec.bench.rows.synthetic import remove_leftovers
from edgespec.bench.rows.workload import balanced, own_questions, read_questions
from edgespec.cli.main import main
from edgespec.cli.options.rows import form_and_file, with_bare_json
from edgespec.errors import BackendError, OutputError, UsageError
from edgespec.files.writing import open_locked
from edgespec.generation.config import GenerationConfig

# Questions


def test_our_own_questions_are_of_five_kinds() -> None:
    questions = own_questions()
    assert Counter(question.category for question in questions) == dict.fromkeys(
        ("chat", "code", "summary", "translation", "reasoning"), 3
    )
    assert len({question.text for question in questions}) == len(questions)


def test_spec_bench_is_read_and_the_first_turn_asked(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
        {"question_id": "x", "category": "math", "turns": ["1 + 1?"], "reference": ["2"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [(q.identifier, q.category, q.text) for q in read_questions(file)] == [
        ("81", "writing", "One?"),
        ("x", "math", "1 + 1?"),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"question_id": 1, "turns": ["a"]}', "has no 'category'"),
        ('{"question_id": 1, "category": "a", "turns": []}', "has no text as its first turn"),
        ('{"question_id": 1, "category": "a", "turns": "a"}', "has no text as its first turn"),
        ('{"question_id": 1, "category": "a", "turns": [" "]}', "has no text as its first turn"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 1, "category": "a", "turns": ["a"]}\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        read_questions(file)
    assert caught.value.what == f"Line 2 of {file} {what}."
    assert "question_id" in caught.value.hint


def test_a_file_without_questions(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, what in (
        (empty, "holds no questions"),
        (binary, "is not a text file"),
        (tmp_path / "none", "cannot be read: No such file"),
    ):
        with pytest.raises(UsageError, match=what):
            read_questions(path)


def test_few_questions_are_of_all_kinds() -> None:
    questions = own_questions()
    assert [q.category for q in balanced(questions, 6)] == [
        *("chat", "code", "summary", "translation", "reasoning"),
        "chat",
    ]
    assert set(balanced(questions, 1000)) == set(questions)
    assert len({q.identifier for q in balanced(questions, 7)}) == 7


def test_the_context_holds_the_longest_question() -> None:
    assert context_for(["short"], 64) == 256
    assert context_for(["short", "x" * 500], 64) == 768
    assert context_for(["x" * 100_000], 64) == 4096


# Rows


def wishes(**changes: Any) -> RowOptions:
    values: dict[str, Any] = {
        "model": Path("big.gguf"),
        "load": {"draft": "small.gguf"},
        "trees": [16, "auto"],
    }
    return RowOptions(**values | changes)


def names(rows: list[RowSpec]) -> list[str]:
    return [row.name for row in rows]


def test_a_model_that_fits_is_measured_in_memory() -> None:
    rows = rows_for(wishes(), fits=True, fits_machine=True)
    assert names(rows) == ["in memory, plain", "in memory, tree 16", "in memory, tree auto"]
    assert rows[0].load == {"model": "big.gguf", "offload": "none", "draft": "none"}
    assert rows[1].load == {
        "model": "big.gguf",
        "offload": "none",
        "draft": "small.gguf",
        "tree_budget": 16,
    }
    assert "tree_budget" not in rows[2].load
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
    assert [row.load.get("memory") for row in rows] == [None, 950, 950, 950, 950]
    assert [row.load["offload"] for row in rows] == ["none", "mmap", "stream", "stream", "stream"]


def test_experts_are_compared_with_whole_layers() -> None:
    rows = rows_for(wishes(cap=1000, marks=("mixed",)), fits=False, fits_machine=False, experts=True)
    assert names(rows)[:3] == [
        "memory-mapped, plain (mixed)",
        "streamed, plain (mixed, whole layers)",
        "streamed, plain (mixed)",
    ]
    assert [row.load.get("experts") for row in rows[:3]] == [None, "never", None]
    assert rows[1].load["memory"] == rows[2].load["memory"] == 950


@pytest.mark.parametrize(("cap", "caps"), [(1000, [None, 1000, 2000]), (None, [None, None, None])])
def test_rows_of_more_experts_have_budgets_and_caps_of_their_own(
    cap: int | None, caps: list[int | None]
) -> None:
    options = wishes(cap=cap, memory=None if cap else 950, marks=("mixed",), held={50: 1900, 25: 950})
    rows = rows_for(options, fits=False, fits_machine=False, experts=True)
    assert names(rows)[2:5] == [
        "streamed, plain (mixed)",
        "streamed, plain (mixed, 25 % of the experts)",
        "streamed, plain (mixed, 50 % of the experts)",
    ]
    assert [row.load["memory"] for row in rows[2:5]] == [950, 950, 1900]
    assert [row.cap for row in rows[2:5]] == caps


def test_memory_that_was_asked_for_goes_before_the_cap() -> None:
    rows = rows_for(wishes(memory=700, cap=1000), fits=False, fits_machine=False)
    assert names(rows)[0] == "memory-mapped, plain"
    assert {row.load["memory"] for row in rows} == {700}


@pytest.mark.parametrize(
    ("offload", "first"),
    [("none", "in memory, plain"), ("mmap", "memory-mapped, plain"), ("stream", "memory-mapped, plain")],
)
def test_a_way_that_was_asked_for(offload: str, first: str) -> None:
    rows = rows_for(wishes(offload=offload), fits=offload == "stream", fits_machine=False)
    assert names(rows)[0] == first
    assert any(row.place == "stream" for row in rows) == (offload == "stream")


def test_without_drafts_there_are_no_trees() -> None:
    rows = rows_for(wishes(load={"draft": "none", "tree": "chain"}), fits=True, fits_machine=True)
    assert names(rows) == ["in memory, plain"]
    assert "tree" not in rows[0].load


# Arithmetic


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.5]) == {
        "tokens_per_second": 2.5,
        "tokens_per_second_min": 1.0,
        "tokens_per_second_max": 3.0,
    }
    assert spread([]) == {}


def test_a_curve_between_and_beyond_its_points() -> None:
    curve = {1: 1.0, 2: 1.0, 4: 3.0}
    assert [at(curve, rows) for rows in (1, 1.5, 3, 4, 6)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert at({8: 2.0}, 3) == 2.0


def test_the_knee_is_where_rows_begin_to_cost() -> None:
    assert knee({1: 1.0, 2: 1.1, 8: 1.25, 16: 1.3}) == 8
    assert knee({1: 1.0, 2: 2.0}) == 1


def test_shares_of_the_limits() -> None:
    row = Row("a", "stream", 16, round_s=2.0, pass_s=1.6, streamed_bytes_per_pass=10**9, rows={8: 3, 16: 1})
    memory = Row("b", "memory", "none", round_s=1.0, pass_s=1.0, streamed_bytes_per_pass=0, rows={8: 1})
    mapped = Row("c", "mmap", "none", round_s=1.0, pass_s=1.0, rows={8: 1})
    fill_shares([row, memory, mapped], 10**9, {8: 0.8, 16: 1.6})
    assert row.disk_share == pytest.approx(0.5)
    assert row.compute_share == pytest.approx((3 * 0.8 + 1.6) / 4 / 1.6)
    assert (memory.disk_share, memory.compute_share) == (None, pytest.approx(0.8))
    assert (mapped.disk_share, mapped.compute_share) == (None, None)
    unknown = Row("d", "stream", 16, round_s=2.0, pass_s=1.6, streamed_bytes_per_pass=10**9, rows={8: 3})
    fill_shares([unknown], None, {})
    assert (unknown.disk_share, unknown.compute_share) == (None, None)


def answered(answers: list[list[int]], **values: Any) -> Row:
    return Row("row", "stream", 16, answers=answers, **values)


def test_answers_are_held_against_the_first_exact_row() -> None:
    plain = answered([[1, 9], [3]], exact=True, kernels="plain")
    near = answered([[1, 9], [3]], exact=False)
    first = answered([[1, 2], [3]], exact=True, kernels="packed")
    cut = answered([[1]], exact=True, kernels="packed")
    wrong = answered([[1, 2], [4]], exact=True, kernels="packed")
    lossy = answered([[7, 2], [4]], exact=True, lossy=True)
    failed = Row("row", "stream", 16, error="no")
    rows = [plain, near, first, cut, wrong, lossy, failed]
    fill_identical(rows)
    assert [row.identical for row in rows] == [False, False, True, True, False, False, None]
    assert broken_promises(rows) == [wrong]


def test_without_exact_rows_the_first_one_counts() -> None:
    rows = [answered([[1]], exact=False), answered([[1, 2]], exact=False), answered([[2]], exact=False)]
    fill_identical(rows)
    assert [row.identical for row in rows] == [True, True, False]
    assert broken_promises(rows) == []


# What is printed

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
        peak_bytes=900_000_000,
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
        predicted_tokens_per_second=5.0,
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
    "model": {
        "name": "small, widened to 1.0 GiB",
        "path": "/m.gguf",
        "bytes": 2**30,
        "widened_from": "s.gguf",
    },
    "limits": {"memory_bytes": 2**29, "cap_bytes": 2**30, "cap": "none"},
    "draft": "small.gguf",
    "notes": ["The target is widened."],
}


def measured() -> Measured:
    curve = {1: 0.45, 16: 0.5, 32: 0.9}
    passes = {rows: {"s": seconds, "wait_s": seconds / 4} for rows, seconds in curve.items()}
    return Measured([replace(row) for row in ROWS], {"stream": passes}, Disk("/m.pack", [2e9, 2.2e9]))


def test_markdown() -> None:
    document = make_document(measured(), ABOUT)
    lines = format_rows(ROWS, document, "md").splitlines()
    assert lines[0].split("|")[1:-1] == [
        f" {'row':<30} ",
        f" {'tokens/s':>16} ",
        " predicted ",
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
    assert "4.00* |      5.00 |" in lines[3]
    assert lines[3].endswith("|        NO |")
    assert "|           failed |" in lines[4]
    assert lines[5:] == [
        "",
        "memory-mapped, plain (widened) failed: Killed: <out> of memory.",
        "* cut off by --row-seconds.",
    ]


@pytest.mark.parametrize("columns", [80, 100])
def test_a_table_that_is_too_wide_goes_on_below(columns: int) -> None:
    document = make_document(measured(), ABOUT)
    lines = format_rows(ROWS, document, "md", columns).splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert max(map(len, tables)) <= columns
    titles = [line.split("|")[1:-1] for line in tables if "| row " in line]
    assert len(titles) > 1
    whole = format_rows(ROWS, document, "md").splitlines()[0].split("|")[2:-1]
    assert [title.strip() for row in titles for title in row[1:]] == [title.strip() for title in whole]
    assert lines[-2:] == format_rows(ROWS, document, "md").splitlines()[-2:]


def test_csv_json_and_lines() -> None:
    document = make_document(measured(), ABOUT)
    table = list(csv.DictReader(io.StringIO(format_rows(ROWS, document, "csv"))))
    assert [row["name"] for row in table] == [row.name for row in ROWS]
    assert (table[0]["tokens_per_second"], table[0]["tokens"], table[2]["tokens_per_second"]) == (
        "2.125",
        "2",
        "",
    )
    assert json.loads(format_rows(ROWS, document, "json")) == json.loads(json.dumps(document))
    lines = format_rows(ROWS, document, "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(document["rows"]))


def test_the_document_has_the_knee_and_names_bugs() -> None:
    document = make_document(measured(), ABOUT)
    assert document["curves"]["stream"]["knee"] == 16
    assert document["disk"]["bytes_per_s"] == [2e9, 2.2e9]
    assert document["rows"][0]["rows"] == {"8": 10}
    assert "answers" not in document["rows"][0]
    assert document["notes"][0] == "The target is widened."
    assert document["notes"][-1].startswith("streamed, tree 16 (widened): its answers differ")


class PageReader(HTMLParser):
    """Elements that are open, ids, and everything a browser would fetch."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.scripts = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script" or any(name.startswith("on") for name, _ in attrs)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
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
    assert len(page.ids) == len(set(page.ids)) > 0
    assert not re.search(r"@import|url\((?!#)", text)
    used = set(re.findall(r"#([\w-]+)\"", " ".join(re.findall(r'href="#[^"]*"', text))))
    assert used <= set(page.ids)
    assert text.count("<svg") == 4  # pass curve, yield, time, prediction
    assert not re.search("#0[1-9]0[1-9]", text), "a colour that the page does not choose"
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
    text = make_page(rows, make_document(Measured(rows), ABOUT))
    assert "No row worked." in text
    assert "<svg" not in text
    assert "It was interrupted" in make_page([], make_document(Measured(interrupted=True), ABOUT))


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendError, match="matplotlib, which is not installed") as caught:
        plots.check_matplotlib()
    assert "pip install matplotlib" in caught.value.hint


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


# Processes


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_process_is_told_and_heard() -> None:
    lines: list[str] = []
    program = (
        "import sys; print(sys.stdin.readline().upper(), end='', flush=True); print('x', file=sys.stderr)"
    )
    ended = run_capped(python(program), None, text="hello", on_line=lines.append, keep_errors=True)
    assert (ended.status, ended.output, ended.errors, lines) == (0, "HELLO\n", "x\n", ["HELLO\n"])
    assert ended.rss_bytes > 1 << 20
    assert (ended.peak_bytes, ended.killed) == (0, False)


def test_a_process_is_killed_from_another_thread_with_its_children() -> None:
    killable = Killable()
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    threading.Timer(0.5, killable.kill).start()
    start = time.monotonic()
    assert run_capped(python(program), None, killable=killable).killed
    assert time.monotonic() - start < 20


def test_an_exception_ends_the_process() -> None:
    def fail(_line: str) -> None:
        raise KeyboardInterrupt

    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    lines: list[str] = []

    def note_and_fail(line: str) -> None:
        lines.append(line)
        fail(line)

    with pytest.raises(KeyboardInterrupt):
        run_capped(python(program), None, on_line=note_and_fail)
    with pytest.raises(ProcessLookupError):
        os.kill(int(lines[0]), 0)


@pytest.mark.skipif(capped.cap_kind() == "none", reason="takes root, or systemd for the user")
def test_a_process_is_held_to_its_memory(tmp_path: Path) -> None:
    cap = 96 << 20
    modest = run_capped(python("x = bytearray(40 << 20); print(len(x))"), cap)
    assert (modest.status, modest.output) == (0, f"{40 << 20}\n")
    assert 40 << 20 < modest.peak_bytes <= cap
    greedy = run_capped(python("x = bytearray(400 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"), cap)
    assert greedy.killed
    assert greedy.peak_bytes <= cap
    # The page cache counts: reading a file larger than the cap works, and stays within it.
    file = tmp_path / "large"
    with file.open("wb") as out:
        for _ in range(200):
            out.write(bytes(1 << 20))
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    count = f"f = open({str(file)!r}, 'rb'); print(sum(map(len, iter(lambda: f.read(1 << 20), b''))))"
    read = run_capped(python(count), cap)
    assert (read.status, read.output) == (0, f"{200 << 20}\n")
    assert read.peak_bytes > 64 << 20
    assert read.peak_bytes <= cap
    assert not list(Path("/sys/fs/cgroup").glob(f"**/edgespec-bench-{os.getpid()}-*"))


@pytest.mark.parametrize(
    ("ended", "cap", "what"),
    [
        (Capped("", -9, 0, 1.0), 1 << 30, "Killed: out of memory within 1.0 GiB."),
        (Capped("", 1, 0, 1.0, out_of_memory=True), None, "Killed: out of memory, it seems."),
        (
            Capped("", -11, 0, 1.0),
            None,
            "The process crashed (segmentation fault). Likely llama.cpp is at fault: see 'edgespec doctor'.",
        ),
        (Capped("", -15, 0, 1.0), None, "The process was ended by SIGTERM."),
        (Capped("", 3, 0, 1.0, errors="a\nWorse: b\n\n"), None, "The process ended with status 3: Worse: b"),
    ],
)
def test_why_a_process_failed(ended: Capped, cap: int | None, what: str) -> None:
    assert why_it_failed(ended, cap) == what


def runner(on_row: Callable[[Row, int], None], **changes: Any) -> Runner:
    plan = RunConfig(GenerationConfig(max_tokens=4), ["Hello"], 1, 10.0)
    return Runner(replace(plan, **changes), on_progress=lambda *_: None, on_row=on_row, predict=lambda _: 3.5)


def test_a_row_that_fails_says_why_and_the_next_one_is_tried(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    settings = [
        RowSpec("memory", "none", {"model": str(tmp_path / "none.gguf"), "draft": "none"}),
        RowSpec("memory", "none", {"model": str(tmp_path / "none.gguf"), "context": -1}),
    ]
    done = runner(lambda row, left: told.append((str(row.error), left))).run(settings)
    assert [row.error for row in done.rows] == [error for error, _ in told]
    assert "none.gguf" in told[0][0]
    assert "The context is -1." in told[1][0]
    assert [left for _, left in told] == [1, 0]
    assert [row.predicted_tokens_per_second for row in done.rows] == [3.5, 3.5]
    assert not done.interrupted


def test_cancelling_leaves_the_rows_that_are_done(tmp_path: Path) -> None:
    settings = [RowSpec("memory", "none", {"model": str(tmp_path / "none.gguf")})] * 3
    measuring: Runner

    def stop(_row: Row, left: int) -> None:
        if left == 1:
            measuring.cancel()

    measuring = runner(stop)
    done = measuring.run(settings)
    assert (len(done.rows), done.interrupted) == (2, True)


# llama.cpp


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_llama_cpp_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UsageError, match="There is no llama-completion or llama-cli on the PATH"):
        llamacpp.find_programs("llama.cpp", speculative=False)
    cli = program(tmp_path / "bin" / "llama-cli")
    assert llamacpp.find_programs("llama.cpp", speculative=False) == llamacpp.Programs(cli, None)
    with pytest.raises(UsageError, match="There is no llama-speculative-simple on the PATH"):
        llamacpp.find_programs("llama.cpp", speculative=True)
    second = program(tmp_path / "bin" / "llama-speculative-simple")
    for given in (f"llama.cpp={tmp_path}", f"llama.cpp={cli}", f"llama.cpp={tmp_path / 'bin'}"):
        assert llamacpp.find_programs(given, speculative=True) == llamacpp.Programs(cli, second)
    with pytest.raises(UsageError, match="does not exist"):
        llamacpp.find_programs(f"llama.cpp={tmp_path / 'none'}", speculative=True)
    with pytest.raises(UsageError, match="Comparing with 'ollama' is not supported"):
        llamacpp.find_programs("ollama", speculative=True)


PRINTS = """cat <<'END'
perf_print: prompt eval time =   100.00 ms /    20 tokens (    5.00 ms per token,   200.00 tokens per second)
perf_print:        eval time =   500.00 ms /    10 runs   (   50.00 ms per token,    20.00 tokens per second)
END
"""


def test_llama_cpp_rows(tmp_path: Path) -> None:
    plain = program(tmp_path / "llama-completion", PRINTS)
    simple = program(
        tmp_path / "llama-speculative-simple", "echo 'decoded   33 tokens in 3 s, speed:   11.000 t/s'\n"
    )
    others = llamacpp.LlamaCpp(
        llamacpp.Programs(plain, simple),
        tmp_path / "big.gguf",
        tmp_path / "small.gguf",
        n_bytes=10**9,
        cap=10**9,
        context=512,
        threads=2,
        temperature=0.0,
        seed=1,
        max_tokens=8,
        repetitions=2,
        row_seconds=60.0,
        marks=("widened",),
    )
    assert [spec.name for spec in others.specs] == [
        "llama.cpp, plain (widened)",
        *(f"llama.cpp, draft {length} (widened)" for length in (4, 8, 16)),
    ]
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Capped:
        commands.append(command)
        return run_capped(command, None, **options)

    rows = [others.measure(spec, ["one", "two"], run) for spec in others.specs[:2]]
    assert [row.samples for row in rows] == [[20.0, 20.0], [pytest.approx(11.0)] * 2]
    assert rows[1].drafter == "small"
    assert all("--no-repack" in command for command in commands)
    assert [command[-1] for command in commands] == ["one", "two"] * 4
    program(plain, "echo 'no model' >&2; exit 3\n")
    assert others.measure(others.specs[0], ["one"], run).error == "Ended with status 3: no model"
    program(plain, "echo fine\n")
    assert others.measure(others.specs[0], ["one"], run).error == "It did not report its speed."


def batches(folder: Path | None, tmp_path: Path, **changes: Any) -> LlamaCppBatches:
    settings: dict[str, Any] = {
        "n_bytes": 10**9,
        "cap": 10**9,
        "threads": 2,
        "tokens": 8,
        "repetitions": 2,
        "row_seconds": 60.0,
        "marks": ("widened",),
    }
    return LlamaCppBatches(folder, tmp_path / "big.gguf", [1, 16], **settings | changes)


def test_llama_cpp_decodes_batches_with_its_own_program(tmp_path: Path) -> None:
    tool = program(
        tmp_path / "bin" / "llama-batched-bench",
        "echo 'loading' >&2\n"
        """echo '{"pp": 2, "tg": 8, "pl": 16, "t_pp": 0.5, "t_tg": 2.0, "speed_tg": 64.0}'\n""",
    )
    others = batches(tmp_path, tmp_path)
    assert [spec.name for spec in others.specs] == [
        "llama.cpp, 1 text (widened)",
        "llama.cpp, 16 texts (widened)",
    ]
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Capped:
        commands.append(command)
        return run_capped(command, None, **options)

    row = others.measure(others.specs[1], ["seven b", "seven b"], run)
    assert row.error is None
    assert (row.texts, row.samples, row.tokens_per_second_a_text) == (16, [64.0, 64.0], 4.0)
    assert row.first_token_s == 0.5 + 2.0 / 8, "the prompts, and one pass"
    assert row.notes == []
    assert len(commands) == 2
    assert commands[0][0] == str(tool)
    words = " ".join(commands[0])
    assert "-c 4096 -npp 2 -ntg 8 -npl 16 -t 2 --no-repack" in words
    assert "--no-repack" not in " ".join(batches(tmp_path, tmp_path, cap=None)._command(1, 2))
    program(tool, "echo 'no model' >&2; exit 3\n")
    assert others.measure(others.specs[0], ["one"], run).error == "Ended with status 3: no model"
    program(tool, "echo fine\n")
    assert others.measure(others.specs[0], ["one"], run).error == "It did not report its speed."
    assert "could not be rendered" in str(others.measure(others.specs[0], [], run).error)


def test_without_the_program_the_bindings_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    others = batches(None, tmp_path)
    command = others._command(16, 20)
    assert command[:3] == [sys.executable, "-m", "edgespec.models.llama.plain_batches"]
    assert " ".join(command[5:]) == "--prompt 20 --tokens 8 --texts 16 --threads 2 --no-repack"
    answered = others.measure(
        others.specs[0], ["one"], lambda *_a, **_k: Capped('{"t_pp": 1, "t_tg": 8, "speed_tg": 1}', 0, 0, 1.0)
    )
    assert answered.notes == ["There is no llama-batched-bench: measured through llama-cpp-python."]


def test_the_folder_of_the_programs(tmp_path: Path) -> None:
    tool = program(tmp_path / "bin" / "llama-cli")
    assert llamacpp.program_folder(None) is None
    assert llamacpp.program_folder("llama.cpp") is None
    assert llamacpp.program_folder(f"llama.cpp={tmp_path}") == tmp_path
    assert llamacpp.program_folder(f"llama.cpp={tool}") == tmp_path / "bin"


def test_rows_of_many_texts() -> None:
    rows = rows_for(wishes(texts=(1, 16)), fits=False, fits_machine=False)
    many = [row for row in rows if row.texts]
    assert names(many) == [
        "streamed, 1 text",
        "streamed, 1 text, tree auto",
        "streamed, 16 texts",
        "streamed, 16 texts, tree auto",
    ]
    assert [row.load["parallel"] for row in many] == [1, 1, 16, 16]
    assert many[0].load["draft"] == "none"
    alone = rows_for(wishes(texts=(4,), load={"draft": "none"}), fits=True, fits_machine=True)
    assert names(alone) == ["in memory, plain", "in memory, 4 texts"]
    assert texts_of(["a", "b"], 5) == ["a", "b", "a (2)", "b (2)", "a (3)"]


# Commands


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--tree-budget", "many"], "The tree budget is 'many'."),
        (["--repetitions", "0"], "--repetitions is 0."),
        (["--prompts", "0"], "--prompts is 0."),
        (["--row-seconds", "0"], "--row-seconds is 0."),
        (["--max-tokens", "0"], "max_tokens is 0."),
        (["--memory-cap", "lots"], "'lots' is not a size."),
        (["--memory", "2GiB", "--memory-cap", "1GiB"], "--memory is 2.0 GiB, and --memory-cap 1.0 GiB."),
        (["--keep"], "--keep applies only to --synthesize."),
        (["--offload", "gpu"], "--offload is 'gpu'."),
        (["-o", "xml"], "There is no output format 'xml'."),
        (["-o", "csv", "--json", "-"], "Standard output cannot be both csv and a JSON document."),
        (["--workload", "none.jsonl"], "none.jsonl cannot be read: No such file or directory."),
        (["--compare", "llama.cpp=/none"], "/none does not exist."),
        (["--temperature", "-1"], "temperature is -1.0."),
        (["--parallel", "4,many"], "--parallel is '4,many'. Give numbers of texts, such as 1,4,16,64."),
        (["--parallel", "4,0"], "--parallel is 0. It must be from 1 to 256."),
        (["--held", "25,half"], "--held is '25,half'. Give percents, such as 25,50,75."),
        (["--held", "100"], "--held is 100. It must be from 1 to 99, in percent."),
        (["-o", "rows.xml"], "the name of a file ends in one of them."),
        (["-o", "big.gguf"], "There is no output format 'big.gguf'."),
        (["--json", "big.gguf"], "big.gguf would be written over. Name the model with -m: -m big.gguf"),
        (["a.gguf", "-m", "b.gguf"], "Two models were named: a.gguf and b.gguf."),
    ],
)
def test_refusals(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert what in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        ("bench --json", "bench --json -"),
        ("bench --json -m x.gguf", "bench --json - -m x.gguf"),
        ("bench --json rows.json", "bench --json rows.json"),
        ("bench --json -", "bench --json -"),
        ("generate --json", "generate --json"),
    ],
)
def test_json_without_a_file_is_standard_output(words: str, same_as: str) -> None:
    assert with_bare_json(words.split()) == same_as.split()


def test_the_ending_of_a_file_is_the_format_of_its_rows(tmp_path: Path) -> None:
    assert form_and_file("csv") == ("csv", None)
    assert form_and_file("rows.CSV") == ("csv", "rows.CSV")


@pytest.mark.parametrize("flag", ["--json", "--html", "-o"])
def test_a_file_that_cannot_be_written_is_noticed_first(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", flag, str(tmp_path / "none" / "file.md")]) == 1
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())


def test_a_disk_that_is_too_small_is_noticed_first(
    smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--synthesize", "4096TiB"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "A widened target of 4096.0 TiB and its packed file need 8192.0 TiB of disk" in err
    assert main(["bench", "--synthesize", "1MiB"]) == 2
    assert "and --synthesize requests 1.0 MiB." in " ".join(capsys.readouterr().err.split())


def test_a_dense_model_has_no_rows_of_experts(smol_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(smol_path), "--draft", "none", "--held", "25"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"No single experts of {smol_path.name} are streamed." in err


def test_what_killed_benchmarks_left_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    ours = os.getpid()
    for owner in (gone.pid, ours):
        (tmp_path / f"q4_0-for-{owner}-abc").mkdir()
        (tmp_path / f"q4_0-for-{owner}-abc" / "model.gguf").write_bytes(b"x")
    (tmp_path / f"a-widened-1-for-{gone.pid}.gguf.partial").write_bytes(b"x")
    with open_locked(tmp_path / f"a-widened-1-for-{ours}.gguf.partial"):
        remove_leftovers(tmp_path)
        left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"a-widened-1-for-{ours}.gguf.partial", f"q4_0-for-{ours}-abc"]
