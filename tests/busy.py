"""A machine on which other programs take every core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edgespec.machine.cores import usable_cores

_PROGRAM = "print(flush=True)\nwhile True: pass"


@contextmanager
def busy_machine() -> Iterator[None]:
    """Two programs for each core compute while the block runs."""
    programs = [
        subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE)
        for _ in range(2 * usable_cores())
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()  # it has begun
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate()
