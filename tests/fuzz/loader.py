"""The child process of a fuzz run: damages a model in many ways, and does with each file what EdgeSpec does.

    python -m tests.fuzz.loader

Says "ready" after the peak of its memory in KiB. Takes orders, a line of JSON each: "base" is a file with a
pickled `Header`, "seeds" are numbers of mutations (`UNDAMAGED` is the model itself), "path" is the file to
write, and "beside" is the model that it is a LoRA adapter for, or empty. Answers each seed with a line: the
seed, the peak of memory in KiB, and what became of the file:

- "repeated": it is, byte for byte, an earlier file of this model.
- "refused WHY" by the reader, "error WHY" by llama.cpp, or "loaded".
- "died SIGNAL": the fork died while it did what `runtime.vetting` does in a child process.
- "crash after 'STAGE': died SIGNAL": the fork died at any other time, which is a crash of EdgeSpec.
- "broke ERROR": an exception that is no EdgeSpecError.

Forks do the work, each until it dies. One that computes for too long is ended by the system.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import pickle
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import EdgeSpecError, ModelFileError
from edgespec.models.gguf.header import read_header
from edgespec.processes.exit_status import signal_name
from tests.fuzz.computing import compute
from tests.fuzz.headers import Header
from tests.fuzz.mutations import mutated

UNDAMAGED = -1
STAGES = ("start", "tried", "survived")
_MAX_S = 3  # of processor time, at least: a file that loads takes 0.01 s
_SLOTS, _MAX_PROBES = 1 << 16, 16


def main() -> None:
    from edgespec.llama import load_trial  # noqa: F401 (imported before forks are made)
    from edgespec.llama.runtime.backend import start_backend

    start_backend()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say("ready")
    models: dict[str, tuple[Header, KnownFiles]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["base"] not in models:
            models[order["base"]] = pickle.loads(Path(order["base"]).read_bytes()), KnownFiles()
        _obey(order, *models[order["base"]])


class KnownFiles:
    """The files that forks have seen: a hash table in memory that they share."""

    def __init__(self) -> None:
        self._slots = memoryview(mmap.mmap(-1, 8 * _SLOTS)).cast("Q")

    def add(self, head: bytes, zeros: int) -> bool:
        """Remember a file, given by its beginning and the zeros after that; whether it is new."""
        digest = hashlib.blake2b(head, digest_size=8, key=zeros.to_bytes(8, "little")).digest()
        name = int.from_bytes(digest, "little") or 1
        for probe in range(_MAX_PROBES):
            at = (name + probe) % _SLOTS
            if self._slots[at] == name:
                return False
            if not self._slots[at]:
                self._slots[at] = name
                return True
        return True  # the table is full: some files are loaded again


def _obey(order: Mapping[str, Any], base: Header, known: KnownFiles) -> None:
    """Do what is to be done with each seed, in as many forks as it takes."""
    seeds: Sequence[int] = order["seeds"]
    path, beside = Path(order["path"]), Path(order["beside"]) if order["beside"] else None
    progress = memoryview(mmap.mmap(-1, 16)).cast("Q")  # the seed's index, and the stage's
    while progress[0] < len(seeds):
        child = os.fork()
        if not child:
            while progress[0] < len(seeds):
                seed = seeds[progress[0]]
                _say(_outcome(base, seed, path, known, progress, beside), seed)
                progress[0] += 1
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if code := os.waitstatus_to_exitcode(status):
            stage = STAGES[progress[1]]
            end = f"died {signal_name(code) or f'with status {code}'}"
            _say(end if stage == "tried" else f"crash after '{stage}': {end}", seeds[progress[0]])
            progress[0] += 1


def _outcome(
    base: Header, seed: int, path: Path, known: KnownFiles, progress: memoryview, beside: Path | None
) -> str:
    from edgespec.llama.load_trial import attempt

    progress[1] = STAGES.index("start")
    head, zeros = base.parts() if seed == UNDAMAGED else mutated(base, seed)
    if seed != UNDAMAGED and not known.add(head, zeros):
        return "repeated"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + zeros)
    _limit_time()
    try:
        read_header(path)
    except ModelFileError as error:
        return f"refused {error.what.replace(str(path), 'FILE')}"
    except Exception as error:
        return f"broke {type(error).__name__}: {error}"
    progress[1] = STAGES.index("tried")
    with contextlib.suppress(EdgeSpecError):
        attempt({"path": str(path), **({"beside": str(beside)} if beside else {})})
    progress[1] = STAGES.index("survived")
    try:
        if beside:
            compute(beside, adapter=path)
        else:
            compute(path)
    except EdgeSpecError as error:
        return f"error {error.what.replace(str(path), 'FILE')}"
    except Exception as error:
        return f"broke {type(error).__name__}: {error}"
    return "loaded"


def _limit_time() -> None:
    """Have the system end this process if the next file takes too long."""
    ends, most = resource.getrlimit(resource.RLIMIT_CPU)
    used = time.process_time()
    if ends == resource.RLIM_INFINITY or ends < used + _MAX_S:
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 2 * _MAX_S, most))


def _say(text: str, seed: int | None = None) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = "" if seed is None else f"{seed} "
    os.write(1, f"{number}{peak} {' '.join(text.split())[:400]}\n".encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
