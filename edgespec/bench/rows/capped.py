"""Runs a process under a memory cap that includes the page cache.

Three ways are tried: a control group of version 1 or 2 (making one takes root on most systems), and a scope
of the user's systemd. If none works, the process runs without a cap; `cap_kind` says so.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.processes.children import ChildProcess, find_program, run, start

_KILLED = 9  # SIGKILL, which Python does not have on Windows
_ROOTS = {"cgroup-v1": Path("/sys/fs/cgroup/memory"), "cgroup-v2": Path("/sys/fs/cgroup")}
# The limit of memory, and the one that keeps swap from taking what does not fit.
_LIMITS = {
    "cgroup-v1": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    "cgroup-v2": ("memory.max", "memory.swap.max"),
}
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
_KILLS = ("memory.oom_control", "memory.events")
_numbers = itertools.count()

# Runs the command inside the scope and saves the scope's peak, which disappears with the scope.
_IN_SCOPE = (
    'peak=$0; "$@"; status=$?; '
    'cat "/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/memory.peak" > "$peak" 2>/dev/null; '
    "exit $status"
)


@dataclass(frozen=True)
class CappedResult:
    """The end of a capped process.

    Attributes:
        output: what it wrote to standard output, and to standard error if that was requested.
        errors: what it wrote to standard error, unless that is in `output`.
        status: its exit status; negative for a signal.
        peak_bytes: peak memory of the group, page cache included; 0 if no group could be made.
        rss_bytes: peak memory of the process itself; 0 if the system does not say.
        seconds: from its start to its end.
        out_of_memory: whether the system killed something in the group for exceeding the cap.
    """

    output: str
    status: int
    peak_bytes: int
    seconds: float
    errors: str = ""
    rss_bytes: int = 0
    out_of_memory: bool = False

    @property
    def killed(self) -> bool:
        """True if it was killed, as the system does to a process that exceeds its cap."""
        return self.out_of_memory or self.status in (-_KILLED, 128 + _KILLED)


@functools.cache
def cap_kind() -> str:
    """Return the way to cap memory here: "cgroup-v1", "cgroup-v2", "systemd" or "none"."""
    for kind in _ROOTS:
        group = _made(kind, 1 << 30)
        if group is not None:
            _remove(group)
            return kind
    if find_program("systemd-run"):
        try:
            tried = run(
                [*_scope(1 << 30), "true"],
                capture_output=True,
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return "none"
        if tried.returncode == 0:
            return "systemd"
    return "none"


class KillableProcess:
    """The process that is running, which another thread may kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None

    def kill(self) -> None:
        """Kill it and everything it started; does nothing if no process is running."""
        with self._lock:
            if self._process is not None:
                _kill(self._process)

    @contextlib.contextmanager
    def holding(self, process: ChildProcess) -> Iterator[None]:
        """Make `kill` stop this process while the block runs."""
        with self._lock:
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None


def run_capped(
    command: Sequence[str],
    cap: int | None,
    *,
    with_errors: bool = False,
    keep_errors: bool = False,
    text: str | None = None,
    on_line: Callable[[str], None] | None = None,
    killable: KillableProcess | None = None,
) -> CappedResult:
    """Run a command in at most `cap` bytes of memory; None runs it without a cap.

    It also runs uncapped if no control group can be made. It gets its own process group, which is
    killed if this call is left by an exception.

    Args:
        with_errors: put standard error into `output`.
        keep_errors: put it into `errors`; otherwise it goes where this process's goes.
        text: written to its standard input, which then stays open until the process ends, so that the process
            can notice when its parent is gone; None gives it no input, and on Linux it is killed then.
        on_line: called with each line of its output as it arrives.
    """
    with _group(cap) as (group, scope), tempfile.TemporaryFile() as errors:
        started_at = time.perf_counter()
        command = [*_wrapped(group, scope, cap), *command]
        process = start(
            command,
            with_parent=text is None,
            stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else errors if keep_errors else None,
            start_new_session=True,
        )
        with (killable or KillableProcess()).holding(process):
            try:
                if text is not None:
                    assert process.stdin is not None
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.write(text.encode() + b"\n")
                        process.stdin.flush()
                lines = []
                assert process.stdout is not None
                for raw in process.stdout:
                    lines.append(raw.decode("utf-8", "replace"))
                    if on_line is not None:
                        on_line(lines[-1])
                rss = _wait(process)
            except BaseException:
                _kill(process)
                process.wait()
                raise
            finally:
                process.stdout.close()  # type: ignore[union-attr]
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
        seconds = time.perf_counter() - started_at
        errors.seek(0)
        return CappedResult(
            "".join(lines),
            process.returncode,
            _peak(group, scope),
            seconds,
            errors.read().decode("utf-8", "replace"),
            rss,
            _kills(group) > 0,
        )


def _kill(process: ChildProcess) -> None:
    """Kill a process and, except on Windows, everything it started."""
    if sys.platform == "win32":
        process.kill()
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _wait(process: ChildProcess) -> int:
    """Wait for its end; returns its peak memory."""
    if sys.platform == "win32":
        process.wait()
        return 0
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)


def _wrapped(group: Path | None, scope: Path | None, cap: int | None) -> list[str]:
    """Return the words to put before the command so that it runs within the cap."""
    if group is not None:
        # A shell enters the group and becomes the command: forking a Python process that has threads would
        # be risky.
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    if scope is not None and cap is not None:
        return [*_scope(cap), "/bin/sh", "-c", _IN_SCOPE, str(scope)]
    return []


def _scope(cap: int) -> list[str]:
    options = ["--user", "--scope", "--quiet", "--collect"]
    return ["systemd-run", *options, "-p", f"MemoryMax={cap}", "-p", "MemorySwapMax=0", "--"]


@contextlib.contextmanager
def _group(cap: int | None) -> Iterator[tuple[Path | None, Path | None]]:
    """A memory control group, or the file that a systemd scope's peak goes to; neither without a cap."""
    kind = cap_kind() if cap else "none"
    group = _made(kind, cap) if cap and kind in _ROOTS else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield group, Path(folder) / "peak" if kind == "systemd" else None
        finally:
            if group is not None:
                _remove(group)


def _made(kind: str, cap: int) -> Path | None:
    group = _ROOTS[kind] / f"edgespec-bench-{os.getpid()}-{next(_numbers)}"
    limit, swap = _LIMITS[kind]
    try:
        group.mkdir()
        (group / limit).write_text(str(cap))
    except OSError:
        if group.exists():
            group.rmdir()
        return None
    with contextlib.suppress(OSError):  # a kernel that does not count swap
        if (group / swap).exists():
            (group / swap).write_text(str(cap) if kind == "cgroup-v1" else "0")
    return group


def _remove(group: Path) -> None:
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:  # a process of the child's is still ending
            time.sleep(0.1)


def _peak(group: Path | None, scope: Path | None) -> int:
    files = [group / name for name in _PEAKS] if group else [scope] if scope else []
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            return int(file.read_text())
    return 0


def _kills(group: Path | None) -> int:
    for file in [group / name for name in _KILLS] if group else []:
        with contextlib.suppress(OSError, ValueError):
            rows = [line.split() for line in file.read_text().splitlines()]
            return sum(int(row[1]) for row in rows if row[0] == "oom_kill")
    return 0
