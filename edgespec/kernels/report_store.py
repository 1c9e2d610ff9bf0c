"""The report on the kernel layouts: made once for each processor and build of their libraries, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from edgespec.base.prebuilt import VARIABLE as LLAMA_CPP_FOLDER
from edgespec.errors import BackendError
from edgespec.files.small_json import read_json, remembered
from edgespec.kernels import ggml
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.native import build, library
from edgespec.kernels.report import TrialReport
from edgespec.kernels.setting import (
    AUTO,
    OWN,
    PLAIN,
    VARIABLE,
    allowed_layouts,
    cost_of_missing,
    kernels_of,
    kernels_setting,
    rebuild_command,
)
from edgespec.kernels.trial import TRIAL_TIMEOUT_S, LayoutsUntried, run_trial
from edgespec.machine.cores import probe_cores

_VERSION = 5

_found: TrialReport | None = None  # read or made by this process


def stored_report() -> TrialReport | None:
    """The saved report; None if the layouts have not been tried yet."""
    global _found
    if _found is None:
        _found = read_json(_path(), TrialReport.from_json)
    return _found


def ensure_report(trial: Callable[[], TrialReport] = run_trial) -> TrialReport:
    """The saved report, or a new one if there is none; to be called before a model is loaded.

    Compiles EdgeSpec's own kernels first, if that was not done. If several processes call this at once, one
    makes the report and the others wait. A report is saved if all layouts were tried. With
    EDGESPEC_KERNELS=plain there is nothing to try.

    Raises:
        BackendError: llama.cpp does not work here at all.
    """
    global _found
    if _found is None:
        build.build_once()
    known = stored_report()
    if known is not None:
        return known
    if kernels_setting() == PLAIN:
        return TrialReport()
    path = _path()
    with _alone(path):
        try:
            _found = remembered(path, TrialReport.from_json, trial, TrialReport.to_json)
        except LayoutsUntried as untried:
            _found = untried.report
    return _found


def layouts_in_use(available: Sequence[str], report: TrialReport | None) -> tuple[str, ...]:
    """The available layouts (ggml's names) that are allowed and work, in the same order.

    Raises:
        BackendError: EDGESPEC_KERNELS names a layout that does not work.
    """
    allowed = allowed_layouts(available)
    problems = report.problems if report is not None else {}
    faulty = [name for name in allowed if name in problems]
    if faulty and kernels_setting() != AUTO:
        raise BackendError(
            f"{VARIABLE} asks for {kernels_of(faulty[0])}, and they cannot be used: {problems[faulty[0]]}.",
            f"Set {VARIABLE}={AUTO}. To fix it: {rebuild_command(faulty[0])}",
        )
    return tuple(name for name in allowed if name not in problems)


def report_notes(report: TrialReport) -> list[str]:
    """Notes for somebody who loads a model: which of llama.cpp's layouts are not used, and why."""
    if kernels_setting() != AUTO:
        return []  # leaving a layout out was intended, and asking for a faulty one is an error
    return [
        f"{kernels_of(layout)} are not used: {problem}. {cost_of_missing(layout)} "
        f"To fix it: {rebuild_command(layout)}"
        for layout, problem in report.problems.items()
        if layout != OWN
    ]


def own_fault(faulty: str) -> tuple[str, str]:
    """Why EdgeSpec's own kernels are not used, as a clause, and what to do about it.

    Args:
        faulty: what was found wrong when they were tried; empty if nothing was.

    Returns:
        An empty remedy means that they cannot be had on this machine. Both are empty if nothing is wrong.
    """
    if faulty:
        return faulty, f"To fix it: {rebuild_command(OWN)}"
    if (failure := build.known_failure()) is not None:
        return str(failure).splitlines()[0].rstrip(":"), failure.remedy
    return library.problem(), ""


def _path() -> Path:
    """The report for this processor, this build of llama.cpp and of EdgeSpec's own kernels."""
    own = build.library_path()
    of_own = "" if own is None else f"{own.name} {own.stat().st_mtime_ns}"
    folder = Path(os.environ.get(LLAMA_CPP_FOLDER, Path(llama_cpp.__file__).parent / "lib"))
    return build.reports_folder() / f"tried-{_digest(folder, of_own)}.json"


@cache
def _digest(folder: Path, own: str) -> str:
    """A hash of what kernels depend on.

    Args:
        folder: of llama.cpp's libraries. Those with kernels are identified by their bytes; of several, that
            for this processor.
        own: identifies EdgeSpec's kernels, by their sources.
    """
    digest = hashlib.blake2b(digest_size=12)
    cores = probe_cores()
    digest.update(f"{_VERSION} {llama_cpp.__version__} {cores.model} {' '.join(cores.features)}".encode())
    digest.update(own.encode())
    chosen = ggml.cpu_library() if len(list(folder.glob("*ggml-cpu-*"))) > 1 else None
    with contextlib.suppress(OSError):
        for file in sorted(f for f in folder.iterdir() if "ggml" in f.name and not f.is_symlink()):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            if "ggml-cpu" in file.name and (chosen is None or file.name == chosen.name):
                digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for other processes; continue without a lock if there can be none, or its holder hangs."""
    lock = FileLock(path.with_suffix(".lock"))
    held = False
    with contextlib.suppress(OSError, Timeout):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=2 * TRIAL_TIMEOUT_S)
        held = True
    try:
        yield
    finally:
        if held:
            lock.release()
