"""Trying the kernel layouts: in a child process, as a kernel may crash, hang, or compute nonsense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.errors import BackendError
from edgespec.kernels.rebuild import rebuild_command
from edgespec.kernels.report import Report
from edgespec.kernels.setting import PLAIN
from edgespec.processes.exit_status import crash_fault, ending_signal

TRIAL_TIMEOUT_S = 120.0  # it takes two seconds; more than this on no machine that works

WORKER = (sys.executable, "-m", "edgespec.measure.kernel_worker")


@dataclass
class _Told:
    """What one run of the worker told."""

    layouts: list[str] = field(default_factory=list)
    at: tuple[str, str] = (PLAIN, "loading llama.cpp")
    wrong: dict[str, str] = field(default_factory=dict)
    seconds: dict[int, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    done: bool = False


def run_trial(command: Sequence[str] = WORKER, timeout_s: float = TRIAL_TIMEOUT_S) -> Report:
    """Have a child process compute with every layout, and again without each one that ends it.

    Args:
        command: runs the worker; the layouts to leave out are added as its last argument, in JSON.

    Raises:
        BackendError: llama.cpp crashes or computes nonsense even with weights as they are in the file.
    """
    problems: dict[str, str] = {}
    passing = False
    while True:
        told, returncode, error = _run([*command, json.dumps(sorted(problems))], timeout_s)
        if PLAIN in told.wrong:
            raise _broken(told.wrong[PLAIN])
        problems.update(told.wrong)
        if told.done:
            return Report(problems, told.seconds, passing)
        layout, what = told.at
        reason, lasts = _reason(returncode, error, timeout_s)
        passing = passing or not lasts
        if layout not in told.layouts or layout in problems:  # the plain one, or before all of them
            if lasts:
                raise _broken(f"{reason} {what}")
            # As far as is known nothing is wrong with llama.cpp; the plain layout is the safest.
            untried = f"they could not be tried, as the trial {reason} {what}"
            return Report(dict.fromkeys(told.layouts, untried) | problems, {}, passing=True)
        problems[layout] = f"trying them, llama.cpp {reason} {what}"


def _run(command: list[str], timeout_s: float) -> tuple[_Told, int | None, str]:
    """What the worker told, its exit status (None: stopped, as it hung), and its last words."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # which would start a debugger
        )
    except subprocess.TimeoutExpired as error:
        return _told(error.stdout or b""), None, ""
    except OSError as error:
        return _Told(), 1, str(error)
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return _told(done.stdout), done.returncode, words[-1] if words else ""


def _told(output: bytes) -> _Told:
    told = _Told()
    for line in output.splitlines():
        try:
            event: dict[str, Any] = json.loads(line)
            match event["event"]:
                case "layouts":
                    told.layouts = list(event["names"])
                case "at":
                    told.at = (event["layout"], event["what"])
                case "wrong":
                    told.wrong[event["layout"]] = event["what"]
                case "seconds":
                    told.seconds[int(event["type"])] = {
                        name: tuple(row) for name, row in event["seconds"].items()
                    }
                case "done":
                    told.done = True
        except (ValueError, TypeError, KeyError):
            continue  # something else that was printed, or a line cut short
    return told


def _reason(returncode: int | None, error: str, timeout_s: float) -> tuple[str, bool]:
    """Why the worker ended early, as a verb, and whether that would be so again."""
    if returncode is None:
        return f"did not end within {timeout_s:.0f} s", False
    if fault := crash_fault(returncode):
        return f"crashed ({fault})", True
    if by := ending_signal(returncode):
        return f"was ended by {by}", False
    return f"failed ({error or f'exit status {returncode}'})", False


def _broken(what: str) -> BackendError:
    return BackendError(
        f"llama.cpp does not work on this processor: trying it, it {what}. It was probably compiled for "
        "another processor, or by a compiler that is at fault.",
        f"Compile it again: {rebuild_command()}",
    )
