"""What EdgeSpec costs beside llama.cpp's own work, with the default model in memory.

    python -m benchmarks.overhead

Three questions. Plain decoding: tokens per second against llama-cpp-python's own loop, same model and
settings, alternating. Speculation: the share of a round that is spent outside llama_decode. The graph's
callback: what a pass of one token takes longer where layers are streamed, without waits for the disk, by the
compiled callback and by that in Python; --only callback answers this alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp

import edgespec
from benchmarks.workload import PROMPTS, dropped, q4_0, smollm2
from edgespec.engine.engine import Engine
from edgespec.errors import MemoryLimitError
from edgespec.generation.config import GenerationConfig
from edgespec.kernels.native import gate
from edgespec.models.llama.runtime.context import Context


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", choices=("plain", "speculation", "callback"))
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only in (None, "plain"):
        result["plain"] = plain(options.rounds, options.tokens)
    if options.only in (None, "speculation"):
        for name, draft in (("q4_0", q4_0()), ("drop-18-21", dropped())):
            with edgespec.load(draft=draft, tree_budget=32, exact=False, learn=False) as engine:
                result[name] = speculation(engine, options.tokens, options.rounds)
    if options.only in (None, "callback"):
        result["callback"] = callback(options.rounds, options.tokens)
    for name, figures in result.items():
        print(f"{name:>12}: " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()))
    print(json.dumps(result))


def plain(rounds: int, tokens: int) -> dict[str, float]:
    """Tokens per second of both loops, medians over alternating runs."""
    config = GenerationConfig(max_tokens=tokens)
    ours: dict[bool, list[float]] = {False: [], True: []}
    theirs = []
    with (
        edgespec.load(draft="none", exact=False, context=1024) as engine,
        edgespec.load(draft="none", exact=True, context=1024) as exact_engine,
    ):
        threads = engine.target.context.n_threads
        reference = llama_cpp.Llama(
            str(smollm2()),
            n_ctx=1024,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )
        prompt = engine.encoder.encode(PROMPTS[1])
        for _ in range(rounds):
            for e, exact in ((engine, False), (exact_engine, True)):
                e.target.rewind(0)
                ours[exact].append(e.generate(prompt, config).tokens_per_second)
            theirs.append(_reference_speed(reference, prompt, tokens))
    speeds = {
        "edgespec_tps": statistics.median(ours[False]),
        "edgespec_exact_tps": statistics.median(ours[True]),
        "llama_cpp_python_tps": statistics.median(theirs),
    }
    speeds["ratio"] = speeds["edgespec_tps"] / speeds["llama_cpp_python_tps"]
    speeds["exact_ratio"] = speeds["edgespec_exact_tps"] / speeds["llama_cpp_python_tps"]
    return speeds


def _reference_speed(model: llama_cpp.Llama, prompt: list[int], tokens: int) -> float:
    model.reset()  # type: ignore[no-untyped-call]
    generator = model.generate(prompt, temp=0.0)
    next(generator)
    start = time.perf_counter()
    for _ in range(tokens - 1):
        next(generator)
    return (tokens - 1) / (time.perf_counter() - start)


def speculation(engine: Engine, tokens: int, rounds: int) -> dict[str, float]:
    """Share of a round outside llama_decode, and tokens a pass."""
    shares, per_pass = [], []
    for prompt in PROMPTS[:rounds]:
        engine.target.rewind(0)
        engine.generate(prompt, GenerationConfig(max_tokens=2))  # reads the prompt on both sides
        with timed_decodes() as decodes:
            answer = engine.generate(prompt, GenerationConfig(max_tokens=tokens))
        inside = sum(decodes) - answer.timings.prefill_s
        shares.append(1 - inside / answer.timings.decode_s)
        per_pass.append(answer.tokens_per_pass)
    return {"share_outside_decode": statistics.median(shares), "tokens_per_pass": statistics.mean(per_pass)}


def callback(rounds: int, tokens: int) -> dict[str, float]:
    """Milliseconds of passes of one token, without waits: medians over alternating answers."""
    settings: dict[str, Any] = {"draft": "none", "exact": False, "context": 512, "learn": False}
    model = q4_0()
    budget = _bytes_needed(model, settings) - (1 << 20)  # nearly everything is in memory
    with ExitStack() as stack:
        engines = {"in_memory": stack.enter_context(edgespec.load(model, **settings))}
        for name, found in (("compiled", True), ("python", False)):
            with mock.patch.object(gate, "compiled", lambda found=found: found):
                loaded = edgespec.load(model, offload="stream", memory=budget, **settings)
            engines[name] = stack.enter_context(loaded)
        times: dict[str, list[float]] = {name: [] for name in engines}
        waits: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name, engine in engines.items():
                context = engine.target.context
                context_waited = context.waited_s
                engine.target.rewind(0)
                with timed_decodes(context) as decodes:
                    engine.generate(PROMPTS[1], GenerationConfig(max_tokens=tokens))
                if number:  # the first answer learns where the graph has to stop
                    times[name].append(statistics.median(decodes))
                    waits[name].append((context.waited_s - context_waited) / len(decodes))
        shares = {f"{name}_ms": 1e3 * statistics.median(found) for name, found in times.items()}
        shares |= {f"{name}_wait_ms": 1e3 * statistics.median(waits[name]) for name in ("compiled", "python")}
        for name in ("compiled", "python"):
            pairs = zip(times[name], times["in_memory"], strict=True)
            shares[f"{name}_share"] = statistics.median(own / base for own, base in pairs) - 1
        return shares


def _bytes_needed(model: Path, settings: dict[str, Any]) -> int:
    budget = 1 << 20
    while True:
        try:
            edgespec.load(model, offload="none", memory=budget, **settings).close()
        except MemoryLimitError as error:
            if error.least is None:
                raise
            budget = error.least
        else:
            return budget


@contextmanager
def timed_decodes(context: Context | None = None) -> Iterator[list[float]]:
    """Seconds in llama_decode, call by call; if there is a context, without its waits for weights."""
    seconds: list[float] = []
    decode = llama_cpp.llama_decode

    def now() -> float:
        return time.perf_counter() - (context.waited_s if context else 0.0)

    def timed(*arguments: Any) -> int:
        start = now()
        code: int = decode(*arguments)
        seconds.append(now() - start)
        return code

    llama_cpp.llama_decode = timed
    try:
        yield seconds
    finally:
        llama_cpp.llama_decode = decode


if __name__ == "__main__":
    main()
