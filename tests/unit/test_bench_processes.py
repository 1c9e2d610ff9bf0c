"""The processes that benchmarks measure in: limited, killed and cancelled."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.capped import cap_kind, run_capped
from edgespec.bench.rows.figures import Row, RowSpec
from edgespec.bench.rows.runner import RunConfig, Runner, why_it_failed
from edgespec.config import Config
from edgespec.generation.config import GenerationConfig
from tests.waiting import PATIENCE_S, wait_until


@pytest.mark.parametrize(
    ("status", "errors", "what"),
    [
        (-9, "", "Killed: out of memory, it seems."),
        (
            -11,
            "",
            "The process crashed (segmentation fault). Likely llama.cpp is at fault: see 'edgespec doctor'.",
        ),
        (-15, "", "The process was ended by SIGTERM."),
        (3, "a\nWorse: b\n\n", "The process ended with status 3: Worse: b"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="has no signals")
def test_why_a_process_failed(status: int, errors: str, what: str) -> None:
    assert why_it_failed(status, errors) == what


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


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_cancelling_kills_the_child() -> None:
    measuring = runner(lambda _row, _left: None)
    asked = threading.Thread(target=measuring._run_child, args=(b"", lambda _line: None))
    asked.start()  # the child waits for its task
    wait_until(lambda: measuring._child is not None)
    measuring.cancel()
    asked.join(PATIENCE_S)
    assert not asked.is_alive()


@pytest.mark.skipif(cap_kind() == "none", reason="takes root, or systemd for the user")
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
