"""What a pass costs when the weights do not fit: against the disk, the arithmetic, and llama.cpp.

    python -m benchmarks.streaming [--cap 1200] [--target-bytes 1840000000] [--folder DIR]

The target is SmolLM2-135M-Instruct (Q4_0), widened: the same tokens, the bytes and arithmetic of a
3-billion-parameter model. Each figure is taken in a process of its own, one after the other; those
marked capped run in a memory control group, page cache included (that takes root; without it they run
uncapped, and the table says so). The ideal pass is the longer one of two: the streamed bytes at the
disk's own speed, and the same batch with all weights in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from platformdirs import user_cache_path

import edgespec
from benchmarks.workload import q4_0
from edgespec.engine import Engine
from edgespec.generation import GenerationConfig
from edgespec.hardware.probe import usable_cores
from edgespec.models.batch import Batch
from edgespec.models.runtime import Context, Model
from edgespec.models.widen import widen
from edgespec.offload.layout import PIECE_BYTES
from edgespec.offload.memory import Area
from edgespec.offload.reader import FileReader

ROWS = (1, 32, 64)
PROMPT = "Write a short story about a fox and a crow who share a house."
TOKENS = 24
CONTEXT = 512
_ROUNDS = {1: 15, 32: 7, 64: 5}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cap", type=int, default=1200, help="megabytes (10^6 bytes) of the control group")
    parser.add_argument("--budget", type=int, help="megabytes given to --memory; default: the cap less 5%%")
    parser.add_argument("--target-bytes", type=int, default=1_840_000_000)
    parser.add_argument("--folder", type=Path, default=user_cache_path("edgespec") / "bench-models")
    parser.add_argument("--skip-llama", action="store_true", help="leave out llama.cpp, which is slow here")
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = options.folder / f"smollm2-q4_0-widened-{options.target_bytes}.gguf"
    budget = (options.budget or int(options.cap * 0.95)) * 10**6
    if options.role:
        print(json.dumps(ROLES[options.role](target, budget)))
        return
    if not target.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        widen(q4_0(), target, options.target_bytes)
    arguments = [*sys.argv[1:], "--role"]
    result: dict[str, Any] = {"cap_bytes": options.cap * 10**6, "file_bytes": target.stat().st_size}
    result["first"] = run([*arguments, "streamed"], options.cap)  # packs, and finds the row rule
    result["disk"] = [run([*arguments, "disk"], None)["bytes_per_s"]]
    result["resident"] = run([*arguments, "resident"], None)
    result["streamed"] = run([*arguments, "streamed"], options.cap)
    result["disk"].append(run([*arguments, "disk"], None)["bytes_per_s"])
    if not options.skip_llama:
        result["llama_mmap"] = run([*arguments, "llama"], options.cap)
    report(result)
    print(json.dumps(result))


def report(result: dict[str, Any]) -> None:
    """The table."""
    streamed, resident = result["streamed"], result["resident"]
    speed = statistics.mean(result["disk"])
    read_s = streamed["streamed_bytes"] / speed
    print(f"disk: {' and '.join(f'{one / 1e9:.2f}' for one in result['disk'])} GB/s, before and after")
    print(f"streamed a pass: {streamed['streamed_bytes'] / 1e6:.0f} MB, {read_s:.3f} s at that speed")
    print("rows  resident s  streamed s  waited s  ideal s  ratio")
    for rows in map(str, ROWS):
        took, compute = streamed["pass_s"][rows], resident["pass_s"][rows]
        ideal = max(read_s, compute)
        print(
            f"{rows:>4}  {compute:10.3f}  {took:10.3f}  {streamed['wait_s'][rows]:8.3f}"
            f"  {ideal:7.3f}  {took / ideal:5.2f}"
        )
    print(f"tokens identical to the resident model's: {streamed['tokens'] == resident['tokens']}")
    capped = "capped" if streamed["peak_bytes"] else "NOT capped (needs root)"
    print(
        f"memory: {capped} at {result['cap_bytes'] / 1e6:.0f} MB,"
        f" budget {streamed['budget_bytes'] / 1e6:.0f} MB,"
        f" peak resident set {streamed['peak_rss_bytes'] / 1e6:.0f} MB,"
        f" peak of the group {streamed['peak_bytes'] / 1e6:.0f} MB (page cache included)"
    )
    print(
        f"start-up: {streamed['load_s']:.2f} s; with packing and finding the row rule, where that was to do,"
        f" {result['first']['load_s']:.2f} s; reading the file once {result['file_bytes'] / speed:.2f} s"
    )
    if "llama_mmap" in result:
        theirs = result["llama_mmap"]["pass_s"]["1"]
        print(
            f"llama.cpp, mapped, same cap: {theirs:.3f} s a token,"
            f" {theirs / streamed['pass_s']['1']:.1f} x ours"
        )


def run(arguments: list[str], cap: int | None) -> dict[str, Any]:
    """This script in another role, in a process of its own; capped to so many megabytes."""
    group = _group(cap * 10**6) if cap else None

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.streaming", *arguments],
        stdout=subprocess.PIPE,
        preexec_fn=enter,
        text=True,
        check=False,
    )
    if child.returncode:
        if group is not None:
            _remove(group)
        raise SystemExit(f"{arguments[-1]} ended with status {child.returncode}")
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    result["peak_bytes"] = _peak(group) if group else 0
    if group is not None:
        _remove(group)
    return result


def _remove(group: Path) -> None:
    for _ in range(50):
        try:
            group.rmdir()
            break
        except OSError:  # a process of the child's is still ending
            time.sleep(0.1)


def _group(limit: int) -> Path | None:
    """A memory control group, version 1 or 2; None where there is none to be had."""
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"edgespec-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
            return group
        except OSError:
            if group.exists():
                group.rmdir()
    return None


def _peak(group: Path) -> int:
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


def disk(target: Path, _budget: int) -> dict[str, Any]:
    """Plain sequential direct reads of the whole file, two at a time."""
    reader = FileReader(target)
    slots = 8
    area = Area(slots * PIECE_BYTES)

    def read(piece: int) -> int:
        with area.view(piece % slots * PIECE_BYTES, PIECE_BYTES) as memory:
            return reader.read_into(memory, piece * PIECE_BYTES)

    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        n_bytes = sum(pool.map(read, range(-(-reader.n_bytes // PIECE_BYTES))))
    return {"bytes_per_s": n_bytes / (time.perf_counter() - start), "direct": reader.direct}


def streamed(target: Path, budget: int) -> dict[str, Any]:
    """Through the ring, as `--memory` makes it."""
    start = time.perf_counter()
    with edgespec.load(target, draft="none", context=CONTEXT, offload="stream", memory=budget) as engine:
        load_s = time.perf_counter() - start
        result = _measured(engine)
        return {**result, "load_s": load_s, "notes": engine.notes}


def resident(target: Path, _budget: int) -> dict[str, Any]:
    """All weights in memory, rearranged."""
    with edgespec.load(target, draft="none", context=CONTEXT, exact=True) as engine:
        return _measured(engine)


def llama(target: Path, _budget: int) -> dict[str, Any]:
    """llama.cpp with the file mapped: it cannot rearrange weights that the system pages in and out."""
    model = Model(target, memory_map=True, repack=False)
    context = Context(model, n_cells=CONTEXT, n_rows=64, n_outputs=1, n_sequences=1, n_threads=usable_cores())
    seconds = []
    for position in range(5):
        start = time.perf_counter()
        context.decode(Batch.run([5], position, 1, logits="last"))
        seconds.append(time.perf_counter() - start)
    context.close()
    model.close()
    return {"pass_s": {"1": statistics.median(seconds[1:])}}


def _measured(engine: Engine) -> dict[str, Any]:
    answer = engine.generate(PROMPT, GenerationConfig(max_tokens=TOKENS))
    engine.target.rewind(0)
    context = engine.target.context
    context.clear()
    passes: dict[str, float] = {}
    waits: dict[str, float] = {}
    for rows in ROWS:
        tokens = np.arange(100, 100 + rows, dtype=np.int32)
        seconds, waited = [], context.waited_s
        for _ in range(_ROUNDS[rows]):
            start = time.perf_counter()
            context.decode(Batch.run(tokens, 0, 1, logits="all"))
            seconds.append(time.perf_counter() - start)
            context.clear()
        passes[str(rows)] = statistics.median(seconds)
        waits[str(rows)] = (context.waited_s - waited) / _ROUNDS[rows]
    return {
        "tokens": answer.tokens,
        "pass_s": passes,
        "wait_s": waits,
        "budget_bytes": answer.memory.budget_bytes,
        "peak_rss_bytes": answer.memory.peak_rss_bytes,
        "streamed_bytes": answer.memory.streamed_bytes_per_pass,
        "resident_bytes": answer.memory.resident_bytes,
    }


ROLES = {"disk": disk, "streamed": streamed, "resident": resident, "llama": llama}

if __name__ == "__main__":
    main()
