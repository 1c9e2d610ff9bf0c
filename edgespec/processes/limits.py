"""Limits on this process while untrusted data is decoded."""

from __future__ import annotations

import math
import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path


def limited_memory(n_bytes: int) -> AbstractContextManager[None]:
    """Let this process take no more than this beyond the memory that it has, while a block runs.

    Allocations beyond it fail, which the code that runs must be able to report. Systems that do not say how
    much a process has, such as Windows and macOS, set no limit.
    """
    try:
        mapped = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * mmap.PAGESIZE
    except (OSError, ValueError):  # not on this system
        return nullcontext()
    return _lowered("RLIMIT_AS", mapped + n_bytes)


def limited_time(seconds: float) -> AbstractContextManager[None]:
    """Let this process take no more processor time than this while a block runs; else SIGXCPU ends it.

    Windows sets no limit.
    """
    return _lowered("RLIMIT_CPU", math.ceil(time.process_time() + seconds))


@contextmanager
def _lowered(name: str, limit: int) -> Iterator[None]:
    """Lower a limit of this process while the block runs."""
    if sys.platform == "win32":
        yield
        return
    import resource

    kind = getattr(resource, name)
    before, most = resource.getrlimit(kind)
    known = [known for known in (before, most) if known != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([limit, *known]), most))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, most))
