"""A server that was used for long takes no more memory than one that was used for a while."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.long_use import KINDS, used

_REQUESTS, _EVERY = 400, 100
# In 200 requests, answers and responses that are kept take about half a megabyte, and what the allocator
# keeps varies by 6 MB. So a leak of 60 KB a request is found.
_MAX_GROWTH = 12 << 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/PID/smaps_rollup is Linux's")
def test_memory_does_not_grow_with_use(short_path: Path) -> None:
    use = used(
        short_path,
        list(KINDS),
        requests=_REQUESTS,
        every=_EVERY,
        longest=200,
        options=["--context", "8192"],
    )
    assert not use.problems
    halfway, end = (
        next(held for held in use.held if held.requests == n) for n in (_REQUESTS // 2, _REQUESTS)
    )
    assert end.anonymous - halfway.anonymous < _MAX_GROWTH, use.held
    assert end.threads <= halfway.threads, use.held
    assert end.children - halfway.children < _MAX_GROWTH, use.held
