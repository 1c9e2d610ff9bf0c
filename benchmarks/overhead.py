"""Measure EdgeSpec's overhead beside llama.cpp's own work, with the default model in memory.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --pair TARGET DRAFTER [--nodes 8]

Two questions. Plain decoding: tokens per second against llama-cpp-python's own loop, same model and
settings, alternating. Speculation: the share of a round that is spent outside llama_decode.

With --pair, rounds of trees of a fixed size are taken apart instead: milliseconds of each part, and its share
of the round without the draft. What the drafter does is counted apart, as its steps are.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp

import edgespec
from benchmarks.harness import parser_of
from benchmarks.workload import PROMPTS, dropped, q4_0, smollm2
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFTER"))
    parser.add_argument("--nodes", type=int, default=8)
    options = parser.parse_args()
    if options.pair:
        target, drafter = options.pair
        print_parts(target, drafter, options.nodes, options.tokens, options.rounds)
        return
    result: dict[str, Any] = {"plain": plain(options.rounds, options.tokens)}
    for name, draft in (("q4_0", q4_0()), ("drop-18-21", dropped())):
        with edgespec.load(draft=draft, tree_budget=32, exact=False, learn=False) as engine:
            result[name] = speculation(engine, options.tokens, options.rounds)
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


def print_parts(target: str, drafter: str, nodes: int, tokens: int, rounds: int) -> None:
    """Break down the time of rounds: medians over all rounds of the answers to so many prompts."""
    found: dict[str, list[float]] = {}
    with edgespec.load(target, draft=drafter, tree_budget=nodes, learn=False) as engine:
        engine.speculator.decisions = Decisions(drafting=True)
        for prompt in PROMPTS[:rounds]:
            engine.target.rewind(0)
            engine.generate(prompt, GenerationConfig(max_tokens=2))  # reads the prompt on both sides
            engine.target.rewind(0)
            for parts in rounds_of(engine, prompt, tokens):
                for name, seconds in parts.items():
                    found.setdefault(name, []).append(seconds)
    medians = {name: 1e3 * statistics.median(values) for name, values in found.items()}
    for name, ms in medians.items():
        share = (
            ""
            if "draft" in name or name == "round"
            else f" {100 * ms / medians['round without the draft']:6.1f} %"
        )
        print(f"{name:32} {ms:8.2f} ms{share}")
    print(json.dumps({"nodes": nodes, **{name: round(ms, 3) for name, ms in medians.items()}}))


def rounds_of(engine: Engine, prompt: str, tokens: int) -> Iterator[dict[str, float]]:
    """Yield the seconds of each part of each round of an answer after the first, which reads the prompt."""
    own = engine.target.context.handle
    with timed_decodes() as decodes:
        first = True
        start = time.perf_counter()
        for chunk in engine.stream(prompt, GenerationConfig(max_tokens=tokens)):
            whole, record = time.perf_counter() - start, chunk.record
            calls = list(zip(decodes, decodes.contexts, strict=True))
            decodes.clear()
            if record is not None and not first:
                target = sum(seconds for seconds, context in calls if context == own)
                drafting = sum(seconds for seconds, context in calls if context != own)
                rest = record.draft_s - drafting
                yield {
                    "round": whole,
                    "round without the draft": whole - record.draft_s,
                    "draft: decoding": drafting,
                    "draft: the rest": rest,
                    "draft: the rest, a step": rest / max(record.draft_steps, 1),
                    "target: decoding": target,
                    "target: batch and logits": record.verify_s - target,
                    "observing": record.observe_s,
                    "choosing, learning, committing": record.accept_s - record.observe_s,
                    "between rounds": whole - record.seconds,
                    "all but decoding": whole - record.draft_s - target,
                }
            first = False
            start = time.perf_counter()


class Decodes(list[float]):
    """Seconds of calls of llama_decode.

    Attributes:
        contexts: the context of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[Any] = []

    def clear(self) -> None:
        """Forget the calls so far."""
        super().clear()
        self.contexts.clear()


@contextmanager
def timed_decodes() -> Iterator[Decodes]:
    seconds = Decodes()
    decode = llama_cpp.llama_decode

    def timed(*arguments: Any) -> int:
        start = time.perf_counter()
        code: int = decode(*arguments)
        seconds.append(time.perf_counter() - start)
        seconds.contexts.append(arguments[0])
        return code

    llama_cpp.llama_decode = timed
    try:
        yield seconds
    finally:
        llama_cpp.llama_decode = decode


if __name__ == "__main__":
    main()
