"""Memory that a process still holds after it has opened and closed a streamed model many times.

    python -m tests.leaks MODEL '{"context": 64, "exact": false}'

A process of its own: in that of the tests, threads and files of earlier tests may end in between.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from edgespec.generation.config import GenerationConfig
from tests.least_memory import load_in_least_memory

_WARM, _TIMES = 3, 20


@dataclass(frozen=True)
class Held:
    """Descriptors, threads, and resident bytes of a process."""

    descriptors: int
    threads: int
    resident: int


def held_around(model: Path, **options: Any) -> tuple[Held, Held]:
    """Memory of a process before and after it opens the model 20 times and closes it again."""
    command = [sys.executable, "-m", "tests.leaks", str(model), json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    before, after = (Held(**line) for line in map(json.loads, done.stdout.splitlines()[-2:]))
    return before, after


def held() -> Held:
    """What this process holds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # what was freed and only kept back for later is no leak
        trim(0)
    process = psutil.Process()
    return Held(process.num_fds(), threading.active_count(), process.memory_info().rss)


def main() -> None:
    model, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    for times in (_WARM, _TIMES):  # llama.cpp and Python make permanent allocations in the first
        for _ in range(times):
            with load_in_least_memory(model, **options) as engine:
                engine.generate("Hi", GenerationConfig(max_tokens=2), raw=True)
        print(json.dumps(asdict(held())), flush=True)


if __name__ == "__main__":
    main()
