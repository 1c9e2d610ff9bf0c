"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

_FREED = """
import psutil
from edgespec.machine.memory import release_free_memory

held = [bytes(100_000) for _ in range(1000)]  # each smaller than what malloc takes from the system by itself
last = held.pop()  # keeps the heap from shrinking
held.clear()
before = psutil.Process().memory_info().rss
release_free_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can do that"
)
def test_what_malloc_keeps_is_returned_to_the_system() -> None:
    released = subprocess.run([sys.executable, "-c", _FREED], stdout=subprocess.PIPE, check=True).stdout
    assert int(released) > 50_000_000
