"""The processes that benchmarks measure in: told, heard, limited, killed and cancelled."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgespec.bench.rows import capped
from edgespec.bench.rows.capped import CappedResult, KillableProcess, run_capped
from edgespec.bench.rows.figures import (
    Row,
)
from edgespec.bench.rows.row_spec import RowSpec
from edgespec.bench.rows.runner import RunConfig, Runner, why_it_failed
from edgespec.config import Config
from edgespec.generation.config import GenerationConfig
from tests.waiting import wait_until_ended


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
    killable = KillableProcess()
    child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    children: list[psutil.Process] = []
    killers: list[threading.Thread] = []

    def kill(line: str) -> None:
        children.append(psutil.Process(int(line)))
        killers.append(threading.Thread(target=killable.kill))
        killers[0].start()

    assert run_capped(python(program), None, on_line=kill, killable=killable).killed
    killers[0].join()
    wait_until_ended(*children)


def test_an_exception_ends_the_process() -> None:
    def fail(_line: str) -> None:
        raise KeyboardInterrupt

    program = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
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
        (CappedResult("", -9, 0, 1.0), 1 << 30, "Killed: out of memory within 1.0 GiB."),
        (CappedResult("", 1, 0, 1.0, out_of_memory=True), None, "Killed: out of memory, it seems."),
        (
            CappedResult("", -11, 0, 1.0),
            None,
            "The process crashed (segmentation fault). Likely llama.cpp is at fault: see 'edgespec doctor'.",
        ),
        (CappedResult("", -15, 0, 1.0), None, "The process was ended by SIGTERM."),
        (
            CappedResult("", 3, 0, 1.0, errors="a\nWorse: b\n\n"),
            None,
            "The process ended with status 3: Worse: b",
        ),
    ],
)
def test_why_a_process_failed(ended: CappedResult, cap: int | None, what: str) -> None:
    assert why_it_failed(ended, cap) == what


def runner(on_row: Callable[[Row, int], None], **changes: Any) -> Runner:
    plan = RunConfig(GenerationConfig(max_tokens=4), ["Hello"], 1, 10.0)
    return Runner(replace(plan, **changes), on_progress=lambda *_: None, on_row=on_row)


def test_a_row_that_fails_says_why_and_the_next_one_is_tried(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    settings = [
        RowSpec("memory", "none", Config.of(model=tmp_path / name, draft="none"))
        for name in ("none.gguf", "gone.gguf")
    ]
    done = runner(lambda row, left: told.append((str(row.error), left))).run(settings)
    assert [row.error for row in done.rows] == [error for error, _ in told]
    assert "none.gguf" in told[0][0]
    assert "gone.gguf" in told[1][0]
    assert [left for _, left in told] == [1, 0]
    assert not done.interrupted


def test_cancelling_leaves_the_rows_that_are_done(tmp_path: Path) -> None:
    settings = [RowSpec("memory", "none", Config.of(model=tmp_path / "none.gguf"))] * 3
    measuring: Runner

    def stop(_row: Row, left: int) -> None:
        if left == 1:
            measuring.cancel()

    measuring = runner(stop)
    done = measuring.run(settings)
    assert (len(done.rows), done.interrupted) == (2, True)
