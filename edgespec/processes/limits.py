"""Limits on this process while it decodes untrusted data or tries native code, and on children.

Windows limits the processes that were put into a job, and lets this one put itself into another at any time.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import Popen  # noqa: TID251 - started elsewhere


def limited_memory(n_bytes: int) -> AbstractContextManager[None]:
    """Let this process take no more than this beyond the memory that it has, while a block runs.

    Allocations beyond it fail, which the code that runs must be able to report. Systems that do not say how
    much a process has, such as macOS, set no limit.
    """
    taken = taken_bytes(os.getpid())
    return nullcontext() if taken is None else _lowered(_MEMORY, taken + n_bytes)


def limited_time(seconds: float) -> AbstractContextManager[None]:
    """Let this process take no more processor time than this while a block runs; else the system ends it."""
    return _lowered(_TIME, math.ceil(time.process_time() + seconds))


if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    class _Limits(ctypes.Structure):
        """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

        _fields_ = [
            ("process_ticks", ctypes.c_int64),
            ("job_ticks", ctypes.c_int64),
            ("flags", wintypes.DWORD),
            *((name, ctypes.c_size_t) for name in ("least_resident", "most_resident")),
            ("processes", wintypes.DWORD),
            ("affinity", ctypes.c_size_t),
            *((name, wintypes.DWORD) for name in ("priority", "scheduling")),
            ("reserved", ctypes.c_uint64 * 6),
            *((name, ctypes.c_size_t) for name in ("process_bytes", "job_bytes", "process_peak", "job_peak")),
        ]

    _TIME, _MEMORY, _KILL_ON_CLOSE = 0x2, 0x100, 0x2000
    _TICKS_PER_S = 10**7
    _EXTENDED, _SELF = 9, -1

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateJobObjectW.restype = wintypes.HANDLE
    _kernel.AssignProcessToJobObject.argtypes = [wintypes.HANDLE, wintypes.HANDLE]
    _kernel.SetInformationJobObject.argtypes = [
        *(wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD),
    ]

    class _Job:
        """A job object. Its methods raise OSError if the system refuses."""

        def __init__(self, flags: int = 0) -> None:
            self._handle = _kernel.CreateJobObjectW(None, None)
            self._limits = _Limits(flags=flags)
            self._set()

        def add(self, process: int) -> None:
            """Put a process into it, by its handle."""
            if not _kernel.AssignProcessToJobObject(self._handle, process):
                raise ctypes.WinError(ctypes.get_last_error())

        def limit(self, kind: int, value: int | None) -> int | None:
            """Limit seconds or bytes of each process; None lifts the limit. Returns the limit before."""
            field, unit = ("process_ticks", _TICKS_PER_S) if kind == _TIME else ("process_bytes", 1)
            before = getattr(self._limits, field) // unit if self._limits.flags & kind else None
            setattr(self._limits, field, (value or 0) * unit)
            self._limits.flags = self._limits.flags & ~kind | (0 if value is None else kind)
            self._set()
            return before

        def _set(self) -> None:
            given = (self._handle, _EXTENDED, ctypes.byref(self._limits), ctypes.sizeof(self._limits))
            if not _kernel.SetInformationJobObject(*given):
                raise ctypes.WinError(ctypes.get_last_error())

    @cache
    def _own_job() -> _Job:
        job = _Job()
        job.add(_SELF)
        return job

    @cache
    def _ended_with_this() -> _Job:
        return _Job(_KILL_ON_CLOSE)

    def end_with_this_process(child: Popen[Any]) -> None:
        """Have the system end a child when this process ends."""
        with suppress(OSError):  # it has ended
            _ended_with_this().add(child._handle)  # type: ignore[attr-defined]

    @contextmanager
    def _lowered(kind: int, limit: int) -> Iterator[None]:
        """Limit this process to no more than before while the block runs."""
        before = _own_job().limit(kind, limit)
        try:
            if before is not None and before < limit:
                _own_job().limit(kind, before)
            yield
        finally:
            _own_job().limit(kind, before)

    def limit_trial(cpu_s: float, memory_bytes: int | None = None) -> None:
        """As elsewhere, but that the system ends this process without a signal."""
        _own_job().limit(_TIME, math.ceil(time.process_time() + cpu_s))
        if memory_bytes is not None:
            _own_job().limit(_MEMORY, taken_bytes(os.getpid()) + memory_bytes)

    class ChildMemory:
        """A limit on the memory of a child, beyond what it has now; kept by a job of its own."""

        def __init__(self, child: Popen[Any]) -> None:
            self._taken, self._job = taken_bytes(child.pid), _Job()
            self._job.add(child._handle)  # type: ignore[attr-defined]

        def limit(self, n_bytes: int) -> None:
            """Refuse the child more memory than this."""
            self._job.limit(_MEMORY, self._taken + n_bytes)

    def _memory(process: int) -> Any:
        import psutil  # which is slow to import, for every command

        return psutil.Process(process).memory_info()

    def taken_bytes(process: int) -> int:
        """Bytes of a process's memory, as limits count it."""
        return int(_memory(process).pagefile)

    def memory_is_limited() -> bool:
        """True if the system may refuse memory instead of ending processes when there is none."""
        return False

    def address_space() -> int | None:
        """This process's limit on addresses, in bytes; None without one."""
        return None

    def resident_bytes() -> int:
        """Bytes of memory that this process holds."""
        return int(_memory(os.getpid()).rss)

    def peak_rss() -> int:
        """The peak resident memory of this process, in bytes."""
        return int(_memory(os.getpid()).peak_wset)

else:
    import resource

    _TIME, _MEMORY = resource.RLIMIT_CPU, resource.RLIMIT_AS

    @contextmanager
    def _lowered(kind: int, limit: int) -> Iterator[None]:
        """Lower a limit of this process while the block runs."""
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
        taken = taken_bytes(os.getpid())
        if memory_bytes is not None and taken is not None:
            with suppress(OSError, ValueError):  # the limit on time remains
                resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes,) * 2)

    def end_with_this_process(child: Popen[Any]) -> None:
        """Do nothing: such children watch their time, or see `children.ended_with_parent`."""

    class ChildMemory:
        """A limit on the memory of a child, beyond what it has now; none where the system does not say it."""

        def __init__(self, child: Popen[Any]) -> None:
            self._child, self._taken = child.pid, taken_bytes(child.pid)

        def limit(self, n_bytes: int) -> None:
            """Refuse the child more memory than this."""
            if sys.platform == "linux" and self._taken is not None:
                with suppress(OSError, ValueError):  # it has a lower limit, or has ended
                    most = resource.prlimit(self._child, resource.RLIMIT_AS)[1]
                    resource.prlimit(self._child, resource.RLIMIT_AS, (self._taken + n_bytes, most))

    def taken_bytes(process: int) -> int | None:
        """Bytes of a process's addresses, which limits count; None on other systems than Linux."""
        return _pages(process, 0)

    def _pages(process: int, field: int) -> int | None:
        """A field of a process's statm in bytes."""
        try:
            return int(Path(f"/proc/{process}/statm").read_text("ascii").split()[field]) * mmap.PAGESIZE
        except (OSError, ValueError):
            return None

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
        resident = _pages(os.getpid(), 1)
        return peak_rss() if resident is None else resident

    def peak_rss() -> int:
        """The peak resident memory of this process, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
