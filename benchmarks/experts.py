"""Single experts of a mixture that does not fit: against whole layers, llama.cpp, the disk, and an oracle.

    python -m benchmarks.experts [--experts 64 --used 4] [--held 25 50 75] [--tokens 256] [--folder DIR]

The target is a synthetic mixture of experts, made of SmolLM2-135M-Instruct (Q4_0): every expert computes the
small model's own feed-forward block, behind a synthetic router of a given skew and locality. So its ratios
say what streaming costs at its hit rates, and nothing about the hit rates of any real model. Each figure is
taken in a process of its own, one after the other, in a memory control group of the budget and 5 % more,
page cache included (that takes root; without it they run uncapped, and the table says so).

The oracle replays the choices of the router with the same policy, without any weights: what it misses is what
the pool has to read. What streaming costs is the time of a token beyond what it takes with everything in
memory. It is held against two limits: the missed bytes at the disk's speed for one long read, and the very
same reads, layer by layer and by as many threads, with nothing computed in between.

A prompt of a few hundred tokens is read as well, by single experts and by whole layers.

Where other programs take processor time, passes take longer than their share of it, as the threads of a pass
wait for one another: the report says how much they took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from platformdirs import user_cache_path

import edgespec
from benchmarks.expert_reads import Choices, oracle, read_alone
from benchmarks.harness import measured_apart, parser_of
from benchmarks.mixture import mix
from benchmarks.routers import routers_for
from benchmarks.workload import PROMPTS, q4_0
from edgespec.engine.engine import Engine
from edgespec.errors import MemoryLimitError
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.measure.throughput import sequential_speed
from edgespec.offload.experts.pool import ExpertPool

PROMPT = "Write a short story about a fox and a crow who share a house."
LONG_PROMPT = " ".join(PROMPTS)
CONTEXT = 512
_MAX_CAP_SHARE = 0.95  # of the control group, for the budget


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--experts", type=int, default=64, help="of each layer")
    parser.add_argument("--used", type=int, default=4, help="of them for each token")
    parser.add_argument(
        "--skew", type=float, default=0.7, help="of the routers' choices; see benchmarks.routers"
    )
    parser.add_argument("--locality", type=float, default=0.5, help="of the routers' choices")
    parser.add_argument("--held", type=int, nargs="*", default=[25, 50, 75], help="percent in memory")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=user_cache_path("edgespec") / "bench-models")
    parser.add_argument("--skip", nargs="*", default=[], choices=["layers", "llama", "resident"])
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = f"{options.experts}x{options.used},skew={options.skew:g},locality={options.locality:g}"
    target = options.folder / f"smollm2-q4_0-mixed-{shape}.gguf"
    if options.role:
        print(json.dumps(ROLES[options.role](target, options.budget, options.tokens)))
        return
    if not target.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        start_backend()
        routers = routers_for(q4_0(), options.experts, skew=options.skew, locality=options.locality)
        mix(q4_0(), target, routers, options.used)
    found = run("sizes", None)  # packs the target, too
    disk = sequential_speed(target, max_bytes=2 << 30)[0]
    resident = None if "resident" in options.skip else run("resident", None)
    print(
        f"target: {target.stat().st_size / 1e9:.2f} GB, {found['n_experts']} experts;"
        f" disk {disk / 1e9:.2f} GB/s"
    )
    if resident:
        print(f"all in memory: {1e3 * resident['token_s']:.1f} ms a token")
    for percent in options.held:
        more = max(round(found["n_experts"] * percent / 100) - found["fewest"], 0)
        budget = found["least"] + more * found["slot_bytes"]
        ours = run("experts", budget)
        report(percent, budget, ours, resident, disk)
        for role, name in (("layers", "whole layers"), ("llama", "llama.cpp, mapped")):
            if role not in options.skip:
                theirs = run(role, budget)
                how = f"{1e3 * theirs['token_s']:.0f} ms a token" if theirs else "killed: out of memory"
                ratio = f", {theirs['token_s'] / ours['token_s']:.1f} x ours" if theirs else ""
                prompt = f"; {prompt_speed(theirs)}" if theirs and role == "layers" else ""
                print(f"     {name}: {how}{ratio}{prompt}")


def report(
    percent: int, budget: int, ours: dict[str, Any], resident: dict[str, Any] | None, disk: float
) -> None:
    """The lines for one budget."""
    group = f"peak of the group {ours['peak_bytes'] / 1e6:.0f} MB" if ours["peak_bytes"] else "NOT capped"
    print(
        f"{percent:>3} % of the experts, budget {budget / 1e6:.0f} MB, {group}:"
        f" {1e3 * ours['token_s']:.1f} ms a token ({1e3 * ours['wait_s']:.1f} ms waiting),"
        f" hit rate {ours['hit_rate']:.3f},"
        f" other programs took {ours['others']:.0%} of a core"
    )
    missed_s, alone_s = ours["missed_bytes"] / disk, ours["alone_s"]
    wait_s = max(ours["wait_s"], 1e-9)
    print(
        f"     missed {ours['missed_bytes'] / 1e6:.1f} MB a token, the oracle"
        f" {ours['oracle_bytes'] / 1e6:.1f} MB; read {ours['read_bytes'] / 1e6:.1f} MB"
    )
    print(
        f"     missed bytes at the disk's speed: {1e3 * missed_s:.1f} ms;"
        f" the same reads alone: {1e3 * alone_s:.1f} ms;"
        f" {missed_s / wait_s:.2f} and {alone_s / wait_s:.2f} of the wait"
    )
    if resident:
        cost = max(ours["token_s"] - resident["token_s"], 1e-9)
        print(
            f"     streaming costs {1e3 * cost:.1f} ms a token: {missed_s / cost:.2f} of the disk's speed,"
            f" {alone_s / cost:.2f} of the reads alone;"
            f" same text as in memory: {ours['tokens'] == resident['tokens']}"
        )
    print(f"     {prompt_speed(ours)}")


def prompt_speed(figures: dict[str, Any]) -> str:
    """Speed of reading the long prompt."""
    return f"{figures['prompt_tokens'] / figures['prompt_s']:.0f} tokens/s of a prompt"


def run(role: str, budget: int | None) -> Any:
    """This script in another role, in a process of its own; None if the system killed it."""
    arguments = [*sys.argv[1:], "--role", role, "--budget", str(budget or 0)]
    found = measured_apart("benchmarks.experts", arguments, int(budget / _MAX_CAP_SHARE) if budget else None)
    return None if "killed" in found else found


def sizes(target: Path, _budget: int, _tokens: int) -> dict[str, Any]:
    """The least budget, and what each further expert takes."""
    try:
        load(target, 1 << 20).close()
    except MemoryLimitError as error:
        least = (error.least or 0) + (1 << 20)
    while True:
        try:
            with load(target, least) as engine:
                pool = pool_of(engine)
                # With what the kernels need beside each expert: a few kilobytes.
                return {
                    "least": least,
                    "fewest": pool.n_slots,
                    "n_experts": pool.n_experts,
                    "slot_bytes": pool.slots.slot_bytes + (16 << 10),
                }
        except MemoryLimitError as error:
            least = (error.least or 0) + (1 << 20)


def experts(target: Path, budget: int, n_tokens: int) -> dict[str, Any]:
    """Single experts, and the oracle."""
    passes: list[Choices] = []
    request, next_pass = ExpertPool.request, ExpertPool.next_pass

    def recorded(self: ExpertPool, layer: int, numbers: Any, shares: Any) -> None:
        passes[-1].append((layer, list(numbers), list(shares)))
        request(self, layer, numbers, shares)

    def begun(self: ExpertPool) -> None:
        passes.append([])
        next_pass(self)

    setattr(ExpertPool, "request", recorded)  # noqa: B010
    setattr(ExpertPool, "next_pass", begun)  # noqa: B010
    with load(target, budget) as engine:
        pool = pool_of(engine)
        result = measured(engine, n_tokens)
        missed = oracle(passes, pool.n_slots, pool.n_experts // len(passes[-1]), result["passes"])
        each = pool.slots.slot_bytes / result["passes"]
        result |= read_long_prompt(engine)
        return {
            **result,
            "missed_bytes": result["misses"] * each,
            "oracle_bytes": sum(map(len, missed)) * each,
            "alone_s": read_alone(engine, missed) / result["passes"],
        }


def layers(target: Path, budget: int, n_tokens: int) -> dict[str, Any]:
    """Whole layers, in the same memory."""
    with edgespec.load(
        target, draft="none", context=CONTEXT, memory=budget, offload="stream", experts="never"
    ) as engine:
        return measured(engine, min(n_tokens, 6)) | read_long_prompt(engine)


def resident(target: Path, _budget: int, n_tokens: int) -> dict[str, Any]:
    """All weights in memory, rearranged."""
    with edgespec.load(target, draft="none", context=CONTEXT, offload="none") as engine:
        return measured(engine, n_tokens)


def llama(target: Path, _budget: int, _tokens: int) -> dict[str, Any]:
    """llama.cpp with the file mapped: it cannot rearrange weights that the system pages in and out."""
    with target.open("rb") as file:  # pages that are in the cache already do not count against the group
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model = Model(target, memory_map=True, repack=False)
    context = Context(model, n_cells=CONTEXT, n_rows=64, n_outputs=1, n_sequences=1, n_threads=2)
    tokens = model.vocabulary.tokenize(PROMPT, control=False)
    seconds = []
    for position, token in enumerate(tokens[:12]):
        start = time.perf_counter()
        context.decode(TokenBatch.run([token], position, 1, logits="last"))
        seconds.append(time.perf_counter() - start)
    context.close()
    model.close()
    return {"token_s": statistics.median(seconds[2:])}


def load(target: Path, budget: int) -> Engine:
    return edgespec.load(target, draft="none", context=CONTEXT, memory=budget, offload="stream")


def pool_of(engine: Engine) -> ExpertPool:
    """The pool of a model whose experts are streamed."""
    pool = getattr(engine.target.model.weights, "_pool", None)
    assert isinstance(pool, ExpertPool)
    return pool


def read_long_prompt(engine: Engine) -> dict[str, Any]:
    """Time of a long prompt."""
    engine.target.rewind(0)
    answer = engine.generate(LONG_PROMPT, GenerationConfig(max_tokens=1))
    return {"prompt_tokens": answer.prompt_tokens, "prompt_s": answer.timings.prefill_s}


def measured(engine: Engine, n_tokens: int) -> dict[str, Any]:
    """One answer; what it took and read for each token, its first half left out."""
    begun, others = time.perf_counter(), others_s()
    answer = engine.generate(PROMPT, GenerationConfig(max_tokens=n_tokens))
    others = (others_s() - others) / (time.perf_counter() - begun)
    passes = answer.passes[len(answer.passes) // 2 :]
    used = [record.experts for record in passes if record.experts is not None]
    use = sum(used[1:], used[0]) if used else None
    return {
        "tokens": answer.tokens,
        "passes": len(passes),
        "others": max(others, 0.0),
        "token_s": statistics.mean(record.seconds for record in passes),
        "wait_s": statistics.mean(record.wait_s for record in passes),
        "hit_rate": use.hit_rate if use else 0.0,
        "misses": use.misses if use else 0,
        "read_bytes": use.read_bytes / len(passes) if use else 0,
    }


def others_s() -> float:
    """Processor time of everything but this process so far, in seconds."""
    all_s = psutil.cpu_times()
    own = psutil.Process().cpu_times()
    return float(all_s.user + all_s.nice + all_s.system - own.user - own.system)


ROLES: dict[str, Callable[[Path, int, int], dict[str, Any]]] = {
    "sizes": sizes,
    "experts": experts,
    "layers": layers,
    "resident": resident,
    "llama": llama,
}

if __name__ == "__main__":
    main()
