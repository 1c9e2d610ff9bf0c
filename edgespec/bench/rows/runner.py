"""Measuring row after row, each in a process of its own, so that memory and caches do not mix."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgespec.bench.rows.capped import Capped, Killable, run_capped
from edgespec.bench.rows.figures import Disk, Row, fill_identical, fill_shares, spread
from edgespec.bench.rows.setting import Setting, preparing
from edgespec.generation.config import GenerationConfig
from edgespec.measure.throughput import forget_cached
from edgespec.processes.exit_status import crash_fault, describe_exit
from edgespec.progress import Progress
from edgespec.units import readable

Predict = Callable[[Setting], "float | None"]

_CHILD = [sys.executable, "-m", "edgespec.bench.rows.child"]


def no_prediction(_setting: Setting) -> float | None:
    """Nothing is predicted."""
    return None


@dataclass(frozen=True)
class Plan:
    """What all rows share.

    Attributes:
        prompts: what is asked.
        repetitions: how often, after one answer that is not counted.
        row_seconds: most seconds measured for a row.
        cap: bytes of the control group; None for none.
        profile_s: seconds for a profile of the pair before the rows, if there is none; 0 for none.
        files: the target's files, dropped from the page cache before each row, where they would be free
            memory for a process that is held to its own.
    """

    config: GenerationConfig
    prompts: Sequence[str]
    repetitions: int
    row_seconds: float
    cap: int | None = None
    profile_s: float = 0.0
    files: Sequence[Path] = ()


@dataclass
class Measured:
    """What was found out.

    Attributes:
        curves: seconds of a pass by its rows, and of waiting in it, by where the weights are.
        interrupted: a person ended it before all rows were done.
    """

    rows: list[Row] = field(default_factory=list)
    curves: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    disk: Disk | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


class Others(Protocol):
    """Rows that another program measures."""

    @property
    def settings(self) -> Sequence[Setting]:
        """The rows."""

    def measure(self, setting: Setting, prompts: Sequence[str], run: Run) -> Row:
        """One row."""


Run = Callable[..., Capped]  # run_capped without its `killable`


class Runner:
    """Measures rows, one after the other; `cancel` ends it from another thread.

    Args:
        on_progress: told what is being measured, and the fraction of that which is done.
        on_row: told each row that is done, and how many are left.
        predict: tokens per second that are expected of a setting; None where nobody knows.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        on_progress: Progress,
        on_row: Callable[[Row, int], None],
        predict: Predict = no_prediction,
    ) -> None:
        self._plan = plan
        self._on_progress = on_progress
        self._on_row = on_row
        self._predict = predict
        self._child = Killable()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Kill what runs; nothing more is started."""
        self._cancelled.set()
        self._child.kill()

    def run(self, settings: Sequence[Setting], others: Others | None = None) -> Measured:
        """Measure all rows; a row that fails says why, and the others go on."""
        measured = Measured()
        prompts = self._prepare(settings, measured, rendered=others is not None)
        queue: list[tuple[Setting, Others | None]] = [(setting, None) for setting in settings]
        queue += [(setting, others) for setting in others.settings] if others else []
        for number, (setting, other) in enumerate(queue, start=1):
            if self._cancelled.is_set():
                break
            title = f"Row {number} of {len(queue)}: {setting.name}"
            self._on_progress(title, 0.0)
            self._forget_files()
            row = (
                self._row(setting, title, measured) if other is None else self._other(other, setting, prompts)
            )
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

    def _prepare(self, settings: Sequence[Setting], measured: Measured, *, rendered: bool) -> Sequence[str]:
        """Make what streaming needs, measure the disk; returns the prompts for other programs."""
        result: dict[str, Any] = {}
        for setting in preparing(settings):
            result = self._ask("prepare", setting, "Preparing", profile_s=self._plan.profile_s)
            if "error" not in result:
                break
            measured.notes.append(f"Preparing failed: {result['error']}")
        if rendered and "prompts" not in result:
            result = self._ask("render", settings[0], "Rendering prompts")
        if "disk" in result:
            self._take_disk(result["disk"], measured)
        return list(result.get("prompts", ()))

    def _read_disk_again(self, measured: Measured) -> None:
        if measured.disk is not None and not self._cancelled.is_set():
            result = self._ask("disk", None, "Reading", path=measured.disk.path)
            if "bytes_per_s" in result:
                self._take_disk(result, measured)

    def _take_disk(self, result: dict[str, Any], measured: Measured) -> None:
        measured.disk = measured.disk or Disk(result["path"], direct=result["direct"])
        measured.disk.bytes_per_s.append(result["bytes_per_s"])

    def _row(self, setting: Setting, title: str, measured: Measured) -> Row:
        predicted = self._predict(setting)
        result = self._ask("answers", setting, title)
        capped = setting.capped and self._plan.cap is not None and result.get("group_bytes", 0) > 0
        shared: dict[str, Any] = {"predicted_tokens_per_second": predicted, "capped": capped}
        rss, group = result.pop("rss_bytes", 0) or None, result.pop("group_bytes", 0)
        shared |= {"peak_rss_bytes": rss, "peak_bytes": group or rss}
        if "error" in result:
            return Row.of(setting, error=result["error"], **shared)
        curve = result.pop("curve", None)
        if curve:
            measured.curves[setting.place] = {int(n): pass_ for n, pass_ in curve.items()}
        result["rows"] = {int(n): count for n, count in result["rows"].items()}
        result["notes"] += result.pop("left_out")
        return Row.of(setting, **spread(result["samples"]), **result, **shared)

    def _other(self, other: Others, setting: Setting, prompts: Sequence[str]) -> Row:
        def run(command: Sequence[str], **options: Any) -> Capped:
            cap = self._plan.cap if setting.capped else None
            return run_capped(command, cap, killable=self._child, **options)

        return other.measure(setting, prompts, run)

    def _ask(self, role: str, setting: Setting | None, title: str, **more: Any) -> dict[str, Any]:
        """What a process of its own says; with "error" if it failed."""
        if self._cancelled.is_set():
            return {"error": "Interrupted."}
        plan = self._plan
        task = {
            "role": role,
            "config": asdict(plan.config),
            "prompts": list(plan.prompts),
            "repetitions": plan.repetitions,
            "row_seconds": plan.row_seconds,
            "load": setting.load if setting else {},
            "curve": setting.curve if setting else False,
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

        cap = plan.cap if setting is not None and setting.capped else None
        ended = run_capped(
            _CHILD, cap, text=json.dumps(task), on_line=on_line, keep_errors=True, killable=self._child
        )
        result["group_bytes"] = ended.peak_bytes
        result["rss_bytes"] = ended.rss_bytes
        if ended.status != 0 or len(result) == 2:
            result["error"] = why_it_failed(ended, cap)
        return result

    def _forget_files(self) -> None:
        """Drop the target from the page cache: pages that others have read cost a capped process nothing."""
        for path in self._plan.files:
            with contextlib.suppress(OSError):
                forget_cached(path)


def why_it_failed(ended: Capped, cap: int | None) -> str:
    """A sentence for a process that ended without a result."""
    if ended.killed:
        return f"Killed: out of memory within {readable(cap)}." if cap else "Killed: out of memory, it seems."
    last = next((line.strip() for line in reversed(ended.errors.splitlines()) if line.strip()), "")
    advice = " Likely llama.cpp is at fault: see 'edgespec doctor'." if crash_fault(ended.status) else ""
    return f"The process {describe_exit(ended.status)}{f': {last}' if last else '.'}{advice}"
