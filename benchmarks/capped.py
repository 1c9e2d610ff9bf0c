"""Running a process in a memory control group, page cache included."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Capped:
    """How a capped process ended.

    Attributes:
        output: what it wrote to standard output, and to standard error if that was asked for.
        status: its exit status; negative for a signal.
        peak_bytes: most memory the group held, page cache included; 0 where no group could be made.
        seconds: from its start to its end.
    """

    output: str
    status: int
    peak_bytes: int
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether it was killed, as the system does with a process that goes over its cap."""
        return self.status == -signal.SIGKILL


def run_capped(command: Sequence[str], cap: int | None, *, with_errors: bool = False) -> Capped:
    """Run a command in at most `cap` bytes of memory; None runs it without a cap.

    Where no control group can be made (that takes root on most systems) it runs uncapped too.
    """
    with _group(cap) as group:

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        start = time.perf_counter()
        child = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else None,
            stdin=subprocess.DEVNULL,
            preexec_fn=enter,
            text=True,
            errors="replace",
            check=False,
        )
        seconds = time.perf_counter() - start
        return Capped(child.stdout, child.returncode, _peak(group), seconds)


@contextlib.contextmanager
def _group(cap: int | None) -> Iterator[Path | None]:
    """A memory control group, version 1 or 2; None where there is none to be had."""
    group = _made(cap) if cap else None
    try:
        yield group
    finally:
        for _ in range(50 if group else 0):
            try:
                group.rmdir()  # type: ignore[union-attr]
                break
            except OSError:  # a process of the child's is still ending
                time.sleep(0.1)


def _made(cap: int) -> Path | None:
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"edgespec-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(cap))
            return group
        except OSError:
            if group.exists():
                group.rmdir()
    return None


def _peak(group: Path | None) -> int:
    for name in ("memory.max_usage_in_bytes", "memory.peak") if group else ():
        if (group / name).exists():  # type: ignore[operator]
            return int((group / name).read_text())  # type: ignore[operator]
    return 0
