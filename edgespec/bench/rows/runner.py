"""Measures row after row, each in its own process, so that memory and caches are not shared."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgespec.bench.rows.capped import CappedResult, KillableProcess, run_capped
from edgespec.bench.rows.figures import DiskSpeed, Row, fill_identical, fill_shares, spread
from edgespec.bench.rows.row_spec import RowSpec, preparation_rows
from edgespec.generation.config import GenerationConfig
from edgespec.measure.throughput import forget_cached
from edgespec.processes.children import python_command
from edgespec.processes.exit_status import crash_fault, describe_exit
from edgespec.progress import Progress
from edgespec.units import readable

CHILD = python_command("edgespec.bench.rows.child")


@dataclass(frozen=True)
class RunConfig:
    """The settings that all rows share.

    Attributes:
        prompts: what is asked.
        repetitions: how often, after one answer that is not counted.
        row_seconds: most seconds to measure a row.
        cap: bytes of the control group; None for none.
        files: the target's files. They are dropped from the page cache before each row: pages that are
            already cached would not count towards a capped process.
    """

    config: GenerationConfig
    prompts: Sequence[str]
    repetitions: int
    row_seconds: float
    cap: int | None = None
    files: Sequence[Path] = ()


@dataclass
class BenchMeasurements:
    """The measurements.

    Attributes:
        curves: where the weights are -> rows -> seconds of a pass, and of waiting in it.
        interrupted: stopped before all rows were done.
    """

    rows: list[Row] = field(default_factory=list)
    curves: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    disk: DiskSpeed | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


class ComparedProgram(Protocol):
    """Another program, measured beside EdgeSpec."""

    @property
    def specs(self) -> Sequence[RowSpec]:
        """The rows."""

    def measure(self, spec: RowSpec, prompts: Sequence[str], run: Run) -> Row:
        """One row."""


Run = Callable[..., CappedResult]  # run_capped without its `killable`


class Runner:
    """Measures rows one after the other; `cancel` stops it from another thread.

    Args:
        on_progress: called with what is being measured, and the fraction of it that is done.
        on_row: called with each finished row, and how many are left.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        on_progress: Progress,
        on_row: Callable[[Row, int], None],
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._on_row = on_row
        self._child = KillableProcess()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Kill what is running; nothing more is started."""
        self._cancelled.set()
        self._child.kill()

    def run(self, specs: Sequence[RowSpec], others: Sequence[ComparedProgram] = ()) -> BenchMeasurements:
        """Measure all rows; a row that fails says why, and the others are measured."""
        measured = BenchMeasurements()
        prompts = self._prepare(specs, measured, rendered=bool(others))
        queue: list[tuple[RowSpec, ComparedProgram | None]] = [(spec, None) for spec in specs]
        queue += [(spec, other) for other in others for spec in other.specs]
        for number, (spec, other) in enumerate(queue, start=1):
            if self._cancelled.is_set():
                break
            title = f"Row {number} of {len(queue)}: {spec.name}"
            self._on_progress(title, 0.0)
            self._forget_files()
            row = self._row(spec, title, measured) if other is None else self._other(other, spec, prompts)
            if self._cancelled.is_set():
                break  # the row was killed
            measured.rows.append(row)
            self._on_row(row, len(queue) - number)
        self._read_disk_again(measured)
        resident = {n: pass_["s"] for n, pass_ in measured.curves.get("memory", {}).items()}
        fill_shares(measured.rows, measured.disk.speed if measured.disk else None, resident)
        fill_identical([row for row in measured.rows if row.place != "llama.cpp"])
        measured.interrupted = self._cancelled.is_set()
        return measured

    def _prepare(
        self, specs: Sequence[RowSpec], measured: BenchMeasurements, *, rendered: bool
    ) -> Sequence[str]:
        """Make what streaming needs, measure the disk; returns the prompts for other programs."""
        result: dict[str, Any] = {}
        for spec in preparation_rows(specs):
            result = self._ask("prepare", spec, "Preparing")
            if "error" not in result:
                break
            measured.notes.append(f"Preparing failed: {result['error']}")
        if rendered and "prompts" not in result:
            result = self._ask("render", specs[0], "Rendering prompts")
        if "disk" in result:
            self._note_disk(result["disk"], measured)
        return list(result.get("prompts", ()))

    def _read_disk_again(self, measured: BenchMeasurements) -> None:
        if measured.disk is not None and not self._cancelled.is_set():
            result = self._ask("disk", None, "Reading", path=measured.disk.path)
            if "bytes_per_s" in result:
                self._note_disk(result, measured)

    def _note_disk(self, result: dict[str, Any], measured: BenchMeasurements) -> None:
        measured.disk = measured.disk or DiskSpeed(result["path"], direct=result["direct"])
        measured.disk.bytes_per_s.append(result["bytes_per_s"])

    def _row(self, spec: RowSpec, title: str, measured: BenchMeasurements) -> Row:
        result = self._ask("texts" if spec.texts else "answers", spec, title)
        capped = self._cap_of(spec) is not None and result.get("group_bytes", 0) > 0
        shared: dict[str, Any] = {"capped": capped}
        rss, group = result.pop("rss_bytes", 0) or None, result.pop("group_bytes", 0)
        shared |= {"peak_rss_bytes": rss, "peak_bytes": group or rss}
        if "error" in result:
            return Row.of(spec, error=result["error"], **shared)
        curve = result.pop("curve", None)
        if curve:
            measured.curves[spec.place] = {int(n): pass_ for n, pass_ in curve.items()}
        result["rows"] = {int(n): count for n, count in result["rows"].items()}
        result["notes"] += result.pop("left_out")
        return Row.of(spec, **spread(result["samples"]), **result, **shared)

    def _cap_of(self, spec: RowSpec) -> int | None:
        return (spec.cap or self._config.cap) if spec.capped else None

    def _other(self, other: ComparedProgram, spec: RowSpec, prompts: Sequence[str]) -> Row:
        def run(command: Sequence[str], **options: Any) -> CappedResult:
            cap = self._cap_of(spec)
            if cap:  # the run before left in the page cache what its own group paid for
                self._forget_files()
            return run_capped(command, cap, killable=self._child, **options)

        return other.measure(spec, prompts, run)

    def _ask(self, role: str, spec: RowSpec | None, title: str, **more: Any) -> dict[str, Any]:
        """The result of a child process; it has "error" if the child failed."""
        if self._cancelled.is_set():
            return {"error": "Interrupted."}
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

        def on_line(line: str) -> None:
            try:
                said = json.loads(line)
            except ValueError:
                return  # a library that prints
            if "progress" in said:
                self._on_progress(f"{title}: {said['progress']}", said["fraction"])
            else:
                result.update(said["result"])

        cap = self._cap_of(spec) if spec is not None else None
        ended = run_capped(
            CHILD, cap, text=json.dumps(task), on_line=on_line, keep_errors=True, killable=self._child
        )
        result["group_bytes"] = ended.peak_bytes
        result["rss_bytes"] = ended.rss_bytes
        if ended.status != 0 or len(result) == 2:
            result["error"] = why_it_failed(ended, cap)
        return result

    def _forget_files(self) -> None:
        """Drop the target from the page cache: pages that are already cached cost a capped process
        nothing."""
        for path in self._config.files:
            with contextlib.suppress(OSError):
                forget_cached(path)


def why_it_failed(ended: CappedResult, cap: int | None) -> str:
    """A sentence for a process that ended without a result."""
    if ended.killed:
        return f"Killed: out of memory within {readable(cap)}." if cap else "Killed: out of memory, it seems."
    last = next((line.strip() for line in reversed(ended.errors.splitlines()) if line.strip()), "")
    advice = " Likely llama.cpp is at fault: see 'edgespec doctor'." if crash_fault(ended.status) else ""
    return f"The process {describe_exit(ended.status)}{f': {last}' if last else '.'}{advice}"
