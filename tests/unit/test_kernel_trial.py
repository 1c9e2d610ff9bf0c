"""The trial of kernel layouts: real child processes, some of which crash, hang, or compute nonsense."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from edgespec.base.installation import install_command
from edgespec.errors import BackendError
from edgespec.kernels import report_store
from edgespec.kernels.native import build
from edgespec.kernels.report import ROWS, TrialReport
from edgespec.kernels.report_store import (
    ensure_report,
    layouts_in_use,
    report_notes,
    stored_report,
)
from edgespec.kernels.setting import VARIABLE
from edgespec.kernels.trial import LayoutsUntried, run_trial
from tests.waiting import PATIENCE_S

# A worker that tells of three layouts, and meets its fate at one of them unless that is left out.
WORKER = """
import json, os, signal, sys, time
skipped = json.loads(sys.argv[-1])
fate, at = sys.argv[1], sys.argv[2]
say = lambda event, **values: print(json.dumps({"event": event, **values}), flush=True)
say("layouts", names=["FAST", "FAULTY", "SAFE"])
print("a library prints something")
for layout in ["plain", "FAST", "FAULTY", "SAFE"]:
    if layout in skipped:
        continue
    say("at", layout=layout, what="multiplying Q4_0 with 8 rows")
    if layout == at:
        if fate == "hang": time.sleep(3600)
        if fate == "wrong": say("wrong", layout=layout, what="they compute nonsense")
        if fate == "raise": raise MemoryError("no memory")
        if fate.startswith("SIG"): os.kill(os.getpid(), getattr(signal, fate))
say("seconds", type=2, seconds={"plain": [3, 3, 3], "SAFE": [2, 2, 2]})
say("done")
"""

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def trial(fate: str, at: str, timeout_s: float = PATIENCE_S) -> TrialReport:
    return run_trial([sys.executable, "-c", WORKER, fate, at], timeout_s)


def untried(fate: str, at: str, timeout_s: float = PATIENCE_S) -> TrialReport:
    """The report of a trial that proves nothing, for this process alone."""
    with pytest.raises(LayoutsUntried) as caught:
        trial(fate, at, timeout_s)
    return caught.value.report


def test_nothing_is_wrong() -> None:
    report = trial("none", "none")
    assert report.problems == {}
    assert report.seconds == {2: {"plain": (3, 3, 3), "SAFE": (2, 2, 2)}}


@posix
@pytest.mark.parametrize(
    ("fate", "words", "lasting"),
    [
        ("SIGILL", r"crashed \(illegal instruction\) multiplying Q4_0 with 8 rows", True),
        ("SIGSEGV", r"crashed \(segmentation fault\)", True),
        ("SIGABRT", r"crashed \(abort\)", True),
        ("SIGKILL", "was ended by SIGKILL", False),
        ("raise", r"failed \(MemoryError: no memory\)", False),
        ("wrong", "compute nonsense", True),
    ],
)
def test_a_faulty_layout_is_left_out_and_the_others_are_tried(fate: str, words: str, lasting: bool) -> None:
    report = (trial if lasting else untried)(fate, "FAULTY")
    assert list(report.problems) == ["FAULTY"]
    assert re.search(words, report.problems["FAULTY"])
    assert 2 in report.seconds, "the trial went on without it"


def test_a_layout_that_hangs_is_left_out() -> None:
    for timeout_s in (2.0, 20.0, 200.0):  # a slow machine may not come that far in less
        report = untried("hang", "FAULTY", timeout_s)
        if list(report.problems) == ["FAULTY"]:
            break
    assert list(report.problems) == ["FAULTY"]
    assert f"did not end within {timeout_s:.0f} s" in report.problems["FAULTY"]


@posix
@pytest.mark.parametrize("fate", ["SIGILL", "wrong"])
def test_llama_cpp_that_does_not_work_at_all_is_an_error(fate: str) -> None:
    with pytest.raises(BackendError) as caught:
        trial(fate, "plain")
    assert "does not work on this processor" in caught.value.what
    assert "compiled for another processor" in caught.value.what
    assert install_command(rebuild=True) in caught.value.hint


@posix
def test_a_trial_that_is_killed_is_no_verdict_on_llama_cpp() -> None:
    assert set(untried("SIGKILL", "plain").problems) == {"FAST", "FAULTY", "SAFE"}


def test_a_worker_that_cannot_be_started_is_no_verdict_on_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(LayoutsUntried) as caught:
        run_trial([str(tmp_path / "missing")], 5)
    assert caught.value.report == TrialReport()


# What is kept


@pytest.fixture
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the first run: nothing was found by this process, and nothing is kept."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(report_store, "_found", None)
    monkeypatch.setattr(build, "reports_folder", lambda: tmp_path / "reports")


def test_it_is_tried_once_and_kept(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    report = TrialReport({"FAULTY": "it crashed"}, {2: {"plain": (3.0, 3.0, 3.0)}})
    runs: list[int] = []

    def run() -> TrialReport:
        runs.append(1)
        return report

    assert stored_report() is None
    assert ensure_report(run) == ensure_report(run) == stored_report() == report
    monkeypatch.setattr(report_store, "_found", None)  # the next process
    assert stored_report() == ensure_report(run) == report
    assert len(runs) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": [1], "problems": {}, "seconds": {}}', "\x00"])
def test_what_is_damaged_is_tried_again(
    content: str, nothing_known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_report(lambda: TrialReport({"OLD": "problem"}))
    (file,) = build.reports_folder().glob("*.json")
    file.write_text(content)
    monkeypatch.setattr(report_store, "_found", None)
    assert ensure_report(lambda: TrialReport({"NEW": "problem"})).problems == {"NEW": "problem"}


def test_another_build_is_tried_anew(
    nothing_known: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"faulty kernels")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    ensure_report(lambda: TrialReport({"FAULTY": "it crashed"}))
    library.write_bytes(b"kernels, mended")
    monkeypatch.setattr(report_store, "_found", None)
    report_store._digest.cache_clear()  # as in another process
    assert stored_report() is None


def test_a_cache_that_cannot_be_written_to_stops_nothing(
    nothing_known: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "reports_folder", lambda: tmp_path / "file" / "kernels")
    assert ensure_report(lambda: TrialReport({"A": "b"})).problems == {"A": "b"}


def test_plain_needs_no_trial(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "plain")
    assert ensure_report(lambda: pytest.fail("tried")) == TrialReport()


# What follows


def test_what_does_not_work_is_not_used_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    report = TrialReport({"CPU_REPACK": "trying them, llama.cpp crashed"})
    assert layouts_in_use(["OTHER", "CPU_REPACK"], report) == ("OTHER",)
    (note,) = report_notes(report)
    assert note.startswith("llama.cpp's CPU_REPACK kernels are not used: trying them, llama.cpp crashed.")
    assert "setup.py" in note
    monkeypatch.setenv(VARIABLE, "repack")
    assert report_notes(report) == []
    with pytest.raises(BackendError, match=r"for llama\.cpp's CPU_REPACK kernels, and they cannot be used"):
        layouts_in_use(["OTHER", "CPU_REPACK"], report)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({}, "A"),  # not measured: ggml's order
        ({"A": (2, 2, 2), "B": (1, 1, 1), "plain": (4, 4, 4)}, "B"),
        ({"A": (1, 1, 1), "B": (0.95, 0.95, 0.95), "plain": (4, 4, 4)}, "A"),  # noise
        ({"A": (1, 1, 4), "B": (1.5, 1.5, 1), "plain": (4, 4, 4)}, "B"),
        ({"A": (4, 4, 4), "B": (3, 3, 3), "plain": (1, 1, 1)}, "plain"),
        ({"A": (1, 1, 1), "plain": (4, 4, 4)}, "A"),  # B cannot hold it
    ],
)
def test_the_fastest_is_taken(seconds: dict[str, tuple[float, ...]], best: str) -> None:
    assert TrialReport(seconds={2: seconds}).fastest(2, ("A", "B")) == best


def test_speedups_are_the_middle_of_all_quantizations() -> None:
    seconds = {n: {"plain": (8.0, 8.0, 8.0), "A": (8.0 / n, 4.0, 2.0)} for n in (1, 2, 4)}
    assert TrialReport(seconds=seconds).speedup("A") == (2.0, 2.0, 4.0)
    assert TrialReport(seconds=seconds).speedup("B") is None


def test_a_report_survives_its_file() -> None:
    report = TrialReport({"A": "b"}, {2: {"plain": (0.5, 0.25, 1e-6)}})
    assert len(ROWS) == 3
    assert TrialReport.from_json(json.loads(json.dumps(report.to_json()))) == report
