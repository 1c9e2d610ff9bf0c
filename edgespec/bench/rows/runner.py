"""Measures row after row, each in its own process, so that memory and caches are not shared."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgespec.base.progress import Progress
from edgespec.bench.rows.figures import (
    DiskSpeed,
    Row,
    RowSpec,
    fill_identical,
    fill_shares,
    preparation_rows,
    spread,
)
from edgespec.generation.config import GenerationConfig
from edgespec.measure.throughput import forget_cached
from edgespec.processes.children import ChildProcess, python_command, start
from edgespec.processes.exit_status import crash_fault, describe_exit, signal_name

_CHILD = python_command("edgespec.bench.rows.child")


@dataclass(frozen=True)
class RunConfig:
    """The settings that all rows share."""

    config: GenerationConfig
    prompts: Sequence[str]
    repetitions: int  # after one answer that is not counted
    row_seconds: float  # most seconds to measure a row
    files: Sequence[Path] = ()  # of the target, dropped from the page cache before each row


@dataclass
class BenchMeasurements:
    rows: list[Row] = field(default_factory=list)
    # Where the weights are -> rows -> seconds of a pass ("s"), and of waiting in it ("wait_s").
    curves: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    disk: DiskSpeed | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False  # before all rows were done


class Runner:
    """Measures rows one after the other; `cancel` stops it from another thread.

    Args:
        on_progress: called with what is being measured, and the fraction of it that is done.
        on_row: called with each finished row, and how many are left.
    """

    def __init__(
        self, config: RunConfig, *, on_progress: Progress, on_row: Callable[[Row, int], None]
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._on_row = on_row
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Kill what is running; nothing more is started."""
        self._cancelled.set()
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def run(self, specs: Sequence[RowSpec]) -> BenchMeasurements:
        """Measure all rows; a row that fails says why, and the others are measured."""
        measured = BenchMeasurements()
        self._prepare(specs, measured)
        for number, spec in enumerate(specs, start=1):
            if self._cancelled.is_set():
                break
            title = f"Row {number} of {len(specs)}: {spec.name}"
            self._on_progress(title, 0.0)
            for path in self._config.files:
                with contextlib.suppress(OSError):
                    forget_cached(path)
            row = self._row(spec, title, measured)
            if self._cancelled.is_set():
                break  # the row was killed
            measured.rows.append(row)
            self._on_row(row, len(specs) - number)
        if measured.disk is not None:
            self._note_disk(self._ask("disk", None, "Reading", path=measured.disk.path), measured)
        resident = {n: pass_["s"] for n, pass_ in measured.curves.get("memory", {}).items()}
        fill_shares(measured.rows, measured.disk.speed if measured.disk else None, resident)
        fill_identical(measured.rows)
        measured.interrupted = self._cancelled.is_set()
        return measured

    def _prepare(self, specs: Sequence[RowSpec], measured: BenchMeasurements) -> None:
        """Make what streaming needs, and measure the disk."""
        for spec in preparation_rows(specs):
            result = self._ask("prepare", spec, "Preparing")
            if "error" not in result:
                self._note_disk(result["disk"], measured)
                return
            measured.notes.append(f"Preparing failed: {result['error']}")

    def _note_disk(self, result: dict[str, Any], measured: BenchMeasurements) -> None:
        if "error" not in result:
            measured.disk = measured.disk or DiskSpeed(result["path"], direct=result["direct"])
            measured.disk.bytes_per_s.append(result["bytes_per_s"])

    def _row(self, spec: RowSpec, title: str, measured: BenchMeasurements) -> Row:
        result = self._ask("texts" if spec.texts else "answers", spec, title)
        if "error" in result:
            return Row.of(spec, error=result["error"])
        if curve := result.pop("curve", None):
            measured.curves[spec.place] = {int(n): pass_ for n, pass_ in curve.items()}
        result["rows"] = {int(n): count for n, count in result["rows"].items()}
        return Row.of(spec, **spread(result["samples"]), **result)

    def _ask(self, role: str, spec: RowSpec | None, title: str, **more: Any) -> dict[str, Any]:
        """The result of a child process; it has "error" if the child failed."""
        config = self._config
        task = {
            "role": role,
            "config": asdict(config.config),
            "prompts": list(config.prompts),
            "repetitions": config.repetitions,
            "row_seconds": config.row_seconds,
            "load": spec.load.arguments() if spec else {},
            "curve": spec.curve if spec else False,
            "texts": spec.texts if spec else 0,
            **more,
        }
        result: dict[str, Any] = {}

        def on_line(line: bytes) -> None:
            try:
                said = json.loads(line)
            except ValueError:
                return  # a library that prints
            if "progress" in said:
                self._on_progress(f"{title}: {said['progress']}", said["fraction"])
            else:
                result.update(said["result"])

        status, errors = self._run_child(json.dumps(task).encode() + b"\n", on_line)
        return {"error": why_it_failed(status, errors)} if status != 0 or not result else result

    def _run_child(self, task: bytes, on_line: Callable[[bytes], None]) -> tuple[int, str]:
        """Run the child on a task, which it notices the end of; returns its exit status, and what it printed
        to standard error."""
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._cancelled.is_set():
                    return -1, "Interrupted."
                child = self._child = start(
                    _CHILD,
                    with_parent=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for this process
                )
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(task)
                    child.stdin.flush()  # and left open: the child ends when it closes
                for line in child.stdout:
                    on_line(line)
                child.wait()
            finally:
                with self._lock:
                    self._child = None
                child.kill()
                child.communicate()
            errors.seek(0)
            return child.returncode, errors.read().decode("utf-8", "replace")


def why_it_failed(status: int, errors: str) -> str:
    """A sentence for a process that ended without a result.

    Args:
        status: its exit status; negative for a signal.
        errors: its standard error.
    """
    if signal_name(status) == "SIGKILL":
        return "Killed: out of memory, it seems."
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    advice = " Likely llama.cpp is at fault: see 'edgespec doctor'." if crash_fault(status) else ""
    return f"The process {describe_exit(status)}{f': {last}' if last else '.'}{advice}"
