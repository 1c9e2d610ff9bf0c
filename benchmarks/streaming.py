"""Measure the cost of a pass when the weights do not fit: against the disk, the arithmetic, and llama.cpp.

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
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from platformdirs import user_cache_path

import edgespec
from benchmarks.harness import measured_apart, parser_of
from benchmarks.workload import FOLDER, q4_0, widened
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.machine.probe import usable_cores
from edgespec.measure.throughput import sequential_speed
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.packing.build import build_pack
from edgespec.offload.packing.pack import pack_path

ROWS = (1, 32, 64)
PROMPT = "Write a short story about a fox and a crow who share a house."
TOKENS = 24
CONTEXT = 512
_ROUNDS = {1: 15, 32: 7, 64: 5}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cap", type=int, default=1200, help="megabytes (10^6 bytes) of the control group")
    parser.add_argument("--budget", type=int, help="megabytes given to --memory; default: the cap less 5%%")
    parser.add_argument("--target-bytes", type=int, default=1_840_000_000)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--skip-llama", action="store_true", help="leave out llama.cpp, which is slow here")
    parser.add_argument("--try-slots", type=int, nargs="*", default=[2, 3, 4, 6], help="sizes of the ring")
    parser.add_argument("--try-budgets", type=int, nargs="*", default=[760, 950, 1520], help="megabytes")
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = widened(q4_0(), options.target_bytes, options.folder)
    budget = (options.budget or int(options.cap * 0.95)) * 10**6
    if options.role:
        role = partial(streamed, slots=options.slots) if options.slots else ROLES[options.role]
        print(json.dumps(role(target, budget)))
        return
    arguments = [*sys.argv[1:], "--role"]
    packs = user_cache_path("edgespec") / "packs"
    for old in packs.glob(f"{target.stem}-*.pack"):
        old.unlink()
    result: dict[str, Any] = {"cap_bytes": options.cap * 10**6, "file_bytes": target.stat().st_size}
    result["pack"] = run([*arguments, "pack"], options.cap)
    result["first"] = run([*arguments, "streamed"], options.cap)  # finds the row rule
    result["disk"] = [run([*arguments, "disk"], None)["bytes_per_s"]]
    result["resident"] = run([*arguments, "resident"], None)
    result["streamed"] = run([*arguments, "streamed"], options.cap)
    result["disk"].append(run([*arguments, "disk"], None)["bytes_per_s"])
    result["slots"] = {
        slots: run([*sys.argv[1:], "--slots", str(slots), "--role", "streamed"], options.cap)
        for slots in options.try_slots
    }
    result["budgets"] = {
        budget: run([*sys.argv[1:], "--budget", str(budget), "--role", "streamed"], int(budget / 0.95))
        for budget in options.try_budgets
    }
    if not options.skip_llama:
        result["llama_mmap"] = run([*arguments, "llama"], options.cap)
        result["llama_read"] = run([*arguments, "llama_read"], options.cap)
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
        f"start-up: {streamed['load_s']:.2f} s; the first time, with finding the row rule,"
        f" {result['first']['load_s']:.2f} s; reading the file once {result['file_bytes'] / speed:.2f} s"
    )
    pack = result["pack"]
    print(f"packing: {pack['seconds']:.1f} s once, {pack['pack_bytes'] / 1e6:.0f} MB of disk")
    for kind, runs in (("slots", result["slots"]), ("budget of MB", result["budgets"])):
        for number, one in runs.items():
            times = ", ".join(f"{rows} rows {seconds:.3f} s" for rows, seconds in one["pass_s"].items())
            print(
                f"{kind} {number}: {one['streamed_bytes'] / 1e6:.0f} MB a pass, {times},"
                f" peak of the group {one['peak_bytes'] / 1e6:.0f} MB,"
                f" identical {one['tokens'] == resident['tokens']}"
            )
    for name, how in (("llama_mmap", "mapped"), ("llama_read", "read into memory")):
        theirs = result.get(name)
        if theirs is not None and "killed" in theirs:
            print(f"llama.cpp, {how}, same cap: killed by the system, out of memory")
        elif theirs is not None:
            theirs_s = theirs["pass_s"]["1"]
            print(
                f"llama.cpp, {how}, same cap: {theirs_s:.3f} s a token,"
                f" {theirs_s / streamed['pass_s']['1']:.1f} x ours"
            )


def run(arguments: list[str], cap: int | None) -> dict[str, Any]:
    """This script in another role, in a process of its own; capped to so many megabytes."""
    return measured_apart("benchmarks.streaming", arguments, cap * 10**6 if cap else None)


def disk(target: Path, _budget: int) -> dict[str, Any]:
    """Plain sequential direct reads of the whole file, two at a time."""
    speed, direct = sequential_speed(target, max_bytes=target.stat().st_size)
    return {"bytes_per_s": speed, "direct": direct}


def pack(target: Path, _budget: int) -> dict[str, Any]:
    """Writing the packed layer file, by itself."""
    files = ModelFiles.of(read_header(target))
    start_backend()
    folder = user_cache_path("edgespec") / "packs"
    path = pack_path(folder, files)
    start = time.perf_counter()
    build_pack(path, files, files.layers())
    return {"seconds": time.perf_counter() - start, "pack_bytes": path.stat().st_size}


def streamed(target: Path, budget: int, slots: int | None = None) -> dict[str, Any]:
    """Through the ring, as `--memory` makes it."""
    start = time.perf_counter()
    with edgespec.load(
        target, draft="none", context=CONTEXT, offload="stream", memory=budget, slots=slots
    ) as engine:
        load_s = time.perf_counter() - start
        result = _measured(engine)
        return {**result, "load_s": load_s, "notes": engine.notes}


def resident(target: Path, _budget: int) -> dict[str, Any]:
    """All weights in memory, rearranged."""
    with edgespec.load(target, draft="none", context=CONTEXT, exact=True) as engine:
        return _measured(engine)


def llama(target: Path, _budget: int, memory_map: bool = True) -> dict[str, Any]:
    """llama.cpp with the file mapped: it cannot rearrange weights that the system pages in and out."""
    model = Model(target, memory_map=memory_map, repack=False)
    context = Context(model, n_cells=CONTEXT, n_rows=64, n_outputs=1, n_sequences=1, n_threads=usable_cores())
    seconds = []
    for position in range(5):
        start = time.perf_counter()
        context.decode(TokenBatch.run([5], position, 1, logits="last"))
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
            context.decode(TokenBatch.run(tokens, 0, 1, logits="all"))
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


def llama_read(target: Path, budget: int) -> dict[str, Any]:
    """llama.cpp with the file read into memory."""
    return llama(target, budget, memory_map=False)


ROLES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "disk": disk,
    "pack": pack,
    "streamed": streamed,
    "resident": resident,
    "llama": llama,
    "llama_read": llama_read,
}

if __name__ == "__main__":
    main()
