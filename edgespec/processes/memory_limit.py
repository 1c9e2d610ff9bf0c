"""A limit on the memory of this process while untrusted data is decoded."""

from __future__ import annotations

import sys
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

    before, most = resource.getrlimit(resource.RLIMIT_AS)
    try:
        mapped = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not on this system
        yield
        return
    allowed = mapped + n_bytes
    known = [limit for limit in (before, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([allowed, *known]), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
