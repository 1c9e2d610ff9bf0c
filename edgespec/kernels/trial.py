"""Trying the kernel layouts in a child process, as a kernel may crash, hang, or compute nonsense."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.errors import BackendError, InconclusiveTrial
from edgespec.kernels.report import TrialReport
from edgespec.kernels.setting import AUTO, PLAIN, VARIABLE, rebuild_command
from edgespec.processes.children import python_command, run
from edgespec.processes.exit_status import crash_fault, ending_signal, ran_out_of_time
from edgespec.processes.limits import memory_is_limited

TRIAL_TIMEOUT_S = 240.0  # it takes two seconds; this long only on a machine that starves it

_WORKER = "edgespec.kernels.trial_worker"


class LayoutsUntried(InconclusiveTrial):
    """Not all layouts could be tried.

    Attributes:
        report: for this process alone: the layouts that were not tried are among the problems.
    """

    def __init__(self, reason: str, report: TrialReport) -> None:
        super().__init__("The processor's kernels", reason)
        self.report = report


@dataclass
class _Outcome:
    """The report of one run of the worker."""

    layouts: list[str] = field(default_factory=list)
    at: tuple[str, str] = (PLAIN, "loading llama.cpp")
    wrong: dict[str, str] = field(default_factory=dict)
    seconds: dict[int, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    done: bool = False


def run_trial(command: Sequence[str] = (), timeout_s: float = TRIAL_TIMEOUT_S) -> TrialReport:
    """Compute with every layout in a child process, and start it again without any that crashes it.

    Args:
        command: runs another worker; the layouts to leave out are added as the last argument.

    Raises:
        LayoutsUntried: a child was killed, starved, stopped, or refused memory.
    """
    command = command or python_command(_WORKER)
    problems: dict[str, str] = {}
    inconclusive = ""
    while True:
        outcome, returncode, error = _run([*command, json.dumps(sorted(problems))], timeout_s)
        if PLAIN in outcome.wrong:
            raise _broken(outcome.wrong[PLAIN])
        problems.update(outcome.wrong)
        if outcome.done:
            report = TrialReport(problems, outcome.seconds)
            if inconclusive:
                raise LayoutsUntried(inconclusive, report)
            return report
        layout, what = outcome.at
        reason, persists = _reason(returncode, error, timeout_s)
        if not persists:
            inconclusive = f"{reason} {what}"
        if layout not in outcome.layouts or layout in problems:  # the plain one, or before any layout
            if persists:
                raise _broken(f"{reason} {what}")
            # There is no evidence against llama.cpp; the plain layout is the safest.
            untried = f"they could not be tried, as the trial {reason} {what}"
            raise LayoutsUntried(
                inconclusive, TrialReport(dict.fromkeys(outcome.layouts, untried) | problems)
            )
        problems[layout] = f"trying them, llama.cpp {reason} {what}"


def _run(command: list[str], timeout_s: float) -> tuple[_Outcome, int | None, str]:
    """Run the worker: its report, its exit status (None: killed because it hung), and its last error line."""
    try:
        done = run(
            command,
            with_parent=True,
            # What works does not depend on the setting; and ggml would start a debugger.
            variables={VARIABLE: AUTO, "GGML_NO_BACKTRACE": "1"},
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        return _parse(error.stdout or b""), None, ""
    except OSError as error:
        return _Outcome(), 1, str(error)
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return _parse(done.stdout), done.returncode, words[-1] if words else ""


def _parse(output: bytes) -> _Outcome:
    outcome = _Outcome()
    for line in output.splitlines():
        try:
            event: dict[str, Any] = json.loads(line)
            match event["event"]:
                case "layouts":
                    outcome.layouts = list(event["names"])
                case "at":
                    outcome.at = (event["layout"], event["what"])
                case "wrong":
                    outcome.wrong[event["layout"]] = event["what"]
                case "seconds":
                    outcome.seconds[int(event["type"])] = {
                        name: tuple(row) for name, row in event["seconds"].items()
                    }
                case "done":
                    outcome.done = True
        except (ValueError, TypeError, KeyError):
            continue  # other output, or a truncated line
    return outcome


def _reason(returncode: int | None, error: str, timeout_s: float) -> tuple[str, bool]:
    """The reason why the worker ended early, as a verb phrase, and whether it would again."""
    if returncode is None:
        return f"did not end within {timeout_s:.0f} s", False
    if ran_out_of_time(returncode):
        return "did not end", True  # it limits its own processor time
    if fault := crash_fault(returncode):
        return f"crashed ({fault})", not memory_is_limited()
    if by := ending_signal(returncode):
        return f"was ended by {by}", False
    return f"failed ({error or f'exit status {returncode}'})", False


def _broken(what: str) -> BackendError:
    return BackendError(
        f"llama.cpp does not work on this processor: its trial {what}. It was probably compiled for "
        "another processor, or by a compiler that is at fault.",
        f"Compile it again: {rebuild_command()}",
    )
