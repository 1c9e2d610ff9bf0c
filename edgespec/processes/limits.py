"""Limits on this process while untrusted data is decoded."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited_memory(n_bytes: int) -> Iterator[None]:
    """Let this process take no more than this beyond the memory that it has, while the block runs.

    Allocations beyond it fail, which the code that runs must be able to report. Systems that do not say how
    much a process has, such as Windows and macOS, set no limit.
    """
    if sys.platform == "win32":
        yield
        return
    import resource

    try:
        mapped = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not on this system
        yield
        return
    with _lowered(resource.RLIMIT_AS, mapped + n_bytes):
        yield


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Let this process take no more processor time than this while the block runs; SIGXCPU ends it otherwise.

    Windows sets no limit.
    """
    if sys.platform == "win32":
        yield
        return
    import resource

    with _lowered(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds)):
        yield


@contextmanager
def _lowered(kind: int, limit: int) -> Iterator[None]:
    """Lower a limit of this process while the block runs."""
    import resource

    before, most = resource.getrlimit(kind)
    known = [known for known in (before, most) if known != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([limit, *known]), most))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, most))
