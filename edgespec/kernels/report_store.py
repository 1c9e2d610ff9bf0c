"""What is known of the kernel layouts here: tried once for a llama.cpp build and a processor, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import llama_cpp
from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from edgespec.errors import BackendError
from edgespec.files.writing import atomic_write
from edgespec.kernels.rebuild import rebuild_command
from edgespec.kernels.report import Report
from edgespec.kernels.setting import AUTO, PLAIN, VARIABLE, allowed_layouts, kernels_setting
from edgespec.kernels.trial import TRIAL_TIMEOUT_S, run_trial
from edgespec.machine.cores import probe_cores

Trial = Callable[[], Report]

_VERSION = 1
_PASSING_S = 24 * 3600  # how long a problem counts that may be gone next time

_found: Report | None = None  # by this process


def reports_folder() -> Path:
    """Where reports are kept."""
    return user_cache_path("edgespec") / "kernels"


def stored_report() -> Report | None:
    """What was found here before; None if nothing was tried yet."""
    global _found
    if _found is None:
        _found = _read(_path())
    return _found


def ensure_report(trial: Trial = run_trial, *, again: bool = False) -> Report:
    """What is known, tried now if nothing is; to be called before a model is loaded.

    Several processes at once wait for the one that tries. With EDGESPEC_KERNELS=plain there is nothing to
    try.

    Args:
        again: try even if something is known.

    Raises:
        BackendError: llama.cpp does not work here at all.
        UsageError: EDGESPEC_KERNELS has an unknown value.
    """
    global _found
    known = None if again else stored_report()
    if known is not None:
        return known
    if kernels_setting() == PLAIN:
        return Report()
    path = _path()
    with _alone(path):
        report = None if again else _read(path)
        if report is None:
            report = trial()
            with contextlib.suppress(OSError):  # it is tried again next time
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path, durable=False) as file:
                    file.write(json.dumps(report.to_json(), indent=1).encode())
    _found = report
    return report


def layouts_in_use(available: Sequence[str], report: Report | None) -> tuple[str, ...]:
    """Those of the available layouts (ggml's names) that are allowed and work, in the same order.

    Raises:
        UsageError: EDGESPEC_KERNELS asks for one that is not available, or is none that exists.
        BackendError: EDGESPEC_KERNELS asks for one that does not work.
    """
    allowed = allowed_layouts(available)
    problems = report.problems if report is not None else {}
    faulty = [name for name in allowed if name in problems]
    if faulty and kernels_setting() != AUTO:
        raise BackendError(
            f"{VARIABLE} asks for llama.cpp's {faulty[0]} kernels, and they cannot be used: "
            f"{problems[faulty[0]]}.",
            f"Set {VARIABLE}={AUTO}. To mend it: {rebuild_command(faulty[0])}",
        )
    return tuple(name for name in allowed if name not in problems)


def report_notes(report: Report) -> list[str]:
    """What a person who loads a model should know, in sentences."""
    if kernels_setting() != AUTO:
        return []  # a layout that was left out is not missed, and one that was asked for is an error
    return [
        f"llama.cpp's {layout} kernels are not used: {problem}. Answers are right, but slower than they "
        f"could be. To mend it: {rebuild_command(layout)}"
        for layout, problem in report.problems.items()
    ]


def _path() -> Path:
    """The file for this build and processor; a build is known by the bytes of its kernels."""
    digest = hashlib.blake2b(digest_size=12)
    cores = probe_cores()
    digest.update(f"{_VERSION} {llama_cpp.__version__} {cores.model} {' '.join(cores.features)}".encode())
    for file in _libraries():
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        if "ggml-cpu" in file.name:
            digest.update(file.read_bytes())
    return reports_folder() / f"{digest.hexdigest()}.json"


def _libraries() -> list[Path]:
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH", Path(llama_cpp.__file__).parent / "lib"))
    with contextlib.suppress(OSError):
        return sorted(file for file in folder.iterdir() if "ggml" in file.name and not file.is_symlink())
    return []


def _read(path: Path) -> Report | None:
    try:
        report = Report.from_json(json.loads(path.read_text(encoding="utf-8")))
        if report.passing and time.time() - path.stat().st_mtime > _PASSING_S:
            return None
        return report
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process tries; where there can be no lock file, or another one hangs, at once."""
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
