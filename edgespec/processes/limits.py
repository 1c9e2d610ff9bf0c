"""Limits on this process while it decodes untrusted data or tries native code, and what it holds.

Windows limits nothing here: there, parents end children that take too long.
"""

from __future__ import annotations

import math
import mmap
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path


def limited_memory(n_bytes: int) -> AbstractContextManager[None]:
    """Let this process take no more than this beyond the memory that it has, while a block runs.

    Allocations beyond it fail, which the code that runs must be able to report. Systems that do not say how
    much a process has, such as Windows and macOS, set no limit.
    """
    mapped = _pages(0)
    return nullcontext() if mapped is None else _lowered("RLIMIT_AS", mapped + n_bytes)


def limited_time(seconds: float) -> AbstractContextManager[None]:
    """Let this process take no more processor time than this while a block runs; else SIGXCPU ends it."""
    return _lowered("RLIMIT_CPU", math.ceil(time.process_time() + seconds))


def _pages(field: int) -> int | None:
    """A field of /proc/self/statm in bytes; None on other systems than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[field]) * mmap.PAGESIZE
    except (OSError, ValueError):
        return None


if sys.platform == "win32":
    import psutil

    def _lowered(name: str, limit: int) -> AbstractContextManager[None]:
        return nullcontext()

    def limit_trial(cpu_s: float, memory_bytes: int | None = None) -> None:
        """Set no limits."""

    def memory_is_limited() -> bool:
        """True if the system may refuse memory instead of ending processes when there is none."""
        return False

    def address_space() -> int | None:
        """This process's limit on addresses, in bytes; None without one."""
        return None

    def resident_bytes() -> int:
        """Bytes of memory that this process holds."""
        return int(psutil.Process().memory_info().rss)

    def peak_rss() -> int:
        """The peak resident memory of this process, in bytes."""
        return int(psutil.Process().memory_info().peak_wset)

else:
    import resource

    @contextmanager
    def _lowered(name: str, limit: int) -> Iterator[None]:
        """Lower a limit of this process while the block runs."""
        kind = getattr(resource, name)
        before, most = resource.getrlimit(kind)
        known = [known for known in (before, most) if known != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min([limit, *known]), most))
        try:
            yield
        finally:
            resource.setrlimit(kind, (before, most))

    def limit_trial(cpu_s: float, memory_bytes: int | None = None) -> None:
        """Write no core dump, and have SIGXCPU end this process, which its parent takes for a verdict.

        Args:
            cpu_s: seconds of processor time from now on.
            memory_bytes: memory beyond what it has; None for no limit.

        Raises:
            OSError, ValueError: the system refuses such limits.
        """
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # ignored, the limit would end in SIGKILL
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGXCPU])
        seconds = math.ceil(time.process_time() + cpu_s)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        mapped = _pages(0)
        if memory_bytes is not None and mapped is not None:
            with suppress(OSError, ValueError):  # the limit on time remains
                resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes,) * 2)

    def memory_is_limited() -> bool:
        """True if the system may refuse memory instead of ending processes when there is none."""
        kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
        if any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds):
            return True
        try:
            return Path("/proc/sys/vm/overcommit_memory").read_text("ascii").strip() == "2"
        except OSError:
            return False

    def address_space() -> int | None:
        """This process's limit on addresses, in bytes; None without one."""
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    def resident_bytes() -> int:
        """Bytes of memory that this process holds, or has held where the system does not say."""
        resident = _pages(1)
        return peak_rss() if resident is None else resident

    def peak_rss() -> int:
        """The peak resident memory of this process, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
