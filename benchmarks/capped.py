"""Runs a command in a limited memory, page cache included.

    python -m benchmarks.capped 4GiB edgespec bench big.gguf --memory 3.8GiB

Three ways are tried: a control group of version 1 or 2 (making one takes root on most systems), and a scope
of the user's systemd. If none works, the command runs without a cap; `cap_kind` says so.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.base.units import parse_size, readable
from edgespec.processes.children import find_program, run, start

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
    """The end of a capped process."""

    output: str
    errors: str  # what it wrote to standard error
    status: int  # negative for a signal
    peak_bytes: int = 0  # of the group, page cache included; 0 if no group could be made
    out_of_memory: bool = False  # the system killed something in the group for exceeding the cap

    @property
    def killed(self) -> bool:
        """True if it was killed, as the system does to a process that exceeds its cap."""
        return self.out_of_memory or self.status in (-9, 128 + 9)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    size, *command = sys.argv[1:]
    ended = run_capped(command, parse_size(size), captured=False)
    kind = cap_kind()
    peak = f", at most {readable(ended.peak_bytes)} used" if ended.peak_bytes else ""
    print(f"cap: {size} ({kind}){peak}{', killed' if ended.killed else ''}", file=sys.stderr)
    sys.exit(ended.status)


@functools.cache
def cap_kind() -> str:
    """Return the way to cap memory here: "cgroup-v1", "cgroup-v2", "systemd" or "none"."""
    for kind in _ROOTS if sys.platform == "linux" else ():  # Wine shows Linux's folders
        group = _made(kind, 1 << 30)
        if group is not None:
            _remove(group)
            return kind
    if find_program("systemd-run"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if run([*_scope(1 << 30), "true"], capture_output=True, timeout=10).returncode == 0:
                return "systemd"
    return "none"


def run_capped(command: Sequence[str], cap: int | None, *, captured: bool = True) -> CappedResult:
    """Run a command in at most `cap` bytes of memory; None runs it without a cap.

    It gets its own process group, which is killed if this call is left by an exception.

    Args:
        captured: return what it writes, instead of letting it through.
    """
    pipe = subprocess.PIPE if captured else None
    with _group(cap) as (group, scope):
        process = start(
            [*_wrapped(group, scope, cap), *command],
            with_parent=True,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, errors = process.communicate()
        except BaseException:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        peak, kills = _peak(group, scope), _kills(group)
    return CappedResult(output or "", errors or "", process.returncode, peak, kills > 0)


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


if __name__ == "__main__":
    main()
