"""Tokens per second of a target that does not fit, drafted for in some way, against plain decoding.

    python -m benchmarks.answers --alternate lookup|drafter [--drafter FILE] [--cap 1200] [--disk GB/s]

The target is the widened SmolLM2-135M-Instruct (Q4_0) of benchmarks.streaming, the drafter the model it
was requantized from, which agrees with it on about 3 of 4 tokens. All is done in one process inside a memory
control group, page cache included; what the page cache holds of the target is dropped before.

The two ways take turns, prompt by prompt of `bench`'s own workload or of a file in its format, such as
benchmarks/quoting.jsonl: `lookup` compares everything that needs no drafter with plain decoding, and
`drafter` compares the drafter with it, whose trees are sized while running. Each way learns by itself,
beginning with an answer that is not counted, so that no question is easier for having been asked before. What
was kept of texts is forgotten before each answer; with `--session`, sources keep what they have seen from
question to question, as they do in use.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import edgespec
from benchmarks.harness import measured_apart, parser_of, print_head
from benchmarks.workload import FOLDER, PROMPTS, q4_0, smollm2, widened
from edgespec.bench.rows.preparation import balanced, own_questions, read_questions
from edgespec.engine.sequence import Sizer
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.measure.throughput import forget_cached
from edgespec.offload.layout import Piece
from edgespec.offload.store_reader import StoreReader
from edgespec.speculation.drafters.base import Drafter, NoDrafter
from edgespec.speculation.policies import TreePolicy, tree_policy

CONTEXT = 512
_SUMMED = (  # of passes
    "nodes",
    "draft_s",
    "draft_read_s",
    "draft_steps",
    "wait_s",
    "verify_s",
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cap", type=int, default=1200, help="megabytes (10^6 bytes) of the control group")
    parser.add_argument("--target-bytes", type=int, default=1_840_000_000)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--alternate", choices=("lookup", "drafter"), required=True, help="what is compared")
    parser.add_argument("--drafter", type=Path, help="the drafter of --alternate drafter")
    parser.add_argument("--workload", type=Path, help="questions of --alternate, as JSON lines")
    parser.add_argument("--session", action="store_true", help="forget nothing between different questions")
    parser.add_argument(
        "--disk", type=float, help="slow the reads of --alternate to so many GB/s (10^9 bytes)"
    )
    parser.add_argument("--in-group", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = widened(q4_0(), options.target_bytes, options.folder)
    if options.in_group:
        print(json.dumps(alternating(target, options)))
        return
    forget_cached(target)
    show(measured_apart("benchmarks.answers", [*sys.argv[1:], "--in-group"], options.cap * 10**6))


def alternating(target: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Answer questions in two ways in turn, which begin alternately."""
    ways = ("plain", options.alternate)
    if options.disk:
        slow_down(options.disk * 1e9)
    made: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with edgespec.load(
        target,
        draft="lookup" if options.alternate == "lookup" else options.drafter or smollm2(),
        context=2 * CONTEXT,
        memory=int(options.cap * 10**6 * 0.95),
        learn=False,
    ) as engine:
        config = GenerationConfig(max_tokens=options.tokens, temperature=options.temperature, seed=7)
        drafter = engine.drafter
        states: dict[str, tuple[Sizer, TreePolicy, Drafter]] = {}
        for way in ways:
            engine.set_tree_budget(1 if way == "plain" else None)
            states[way] = engine.speculator.sizer, tree_policy(), NoDrafter() if way == "plain" else drafter

        def answered(way: str, prompt: str, config: GenerationConfig) -> Generation:
            if not options.session:
                engine.forget_texts()
            engine.target.rewind(0)
            engine.speculator.sizer, engine.speculator.policy, engine.drafter = states[way]
            return engine.generate(prompt, config)

        for way in ways:
            answered(way, PROMPTS[-1], config.with_(max_tokens=32))
        questions = read_questions(options.workload) if options.workload else own_questions()
        for number, question in enumerate(balanced(questions, options.prompts)):
            for way in ways if number % 2 else ways[::-1]:
                answer = answered(way, question.text, config)
                figures = {name: sum(getattr(one, name) for one in answer.passes) for name in _SUMMED}
                figures["passes"] = len(answer.passes)
                figures["decode_s"] = answer.timings.decode_s
                print(f"{way}: {len(answer.tokens)} tokens, {figures}", file=sys.stderr, flush=True)
                made[way].append({"category": question.category, "tokens": answer.tokens, **figures})
    return {"ways": made}


def slow_down(rate: float) -> None:
    """Make reads of layers take as long as on a disk of `rate` bytes a second."""
    read, lock, free_at = StoreReader.read, threading.Lock(), 0.0

    def slowly(reader: StoreReader, pieces: Sequence[Piece], memories: Sequence[memoryview]) -> None:
        nonlocal free_at
        with lock:
            n_bytes = sum(piece.n_bytes for piece in pieces)
            until = free_at = max(time.perf_counter(), free_at) + n_bytes / rate
        read(reader, pieces, memories)
        time.sleep(max(until - time.perf_counter(), 0))

    StoreReader.read = slowly  # type: ignore[method-assign,assignment]


def show(row: dict[str, Any]) -> None:
    """Each way's figures over all answers, and the gain by category."""
    first, second = row["ways"].values()
    for way, answers in row["ways"].items():
        total = {name: sum(a[name] for a in answers) for name in (*_SUMMED, "passes", "decode_s")}
        tokens, rounds = sum(len(a["tokens"]) for a in answers), total["passes"]
        print(
            f"{way:>16}: {tokens / total['decode_s']:6.2f} tokens/s, {tokens / rounds:5.2f} a pass,"
            f" {total['nodes'] / rounds:5.1f} nodes, pass {total['verify_s'] / rounds:.3f} s,"
            f" drafting {100 * total['draft_s'] / total['decode_s']:4.1f} % of the time"
            f" ({total['draft_steps'] / rounds:.1f} steps a pass,"
            f" the disk reads for {100 * total['draft_read_s'] / total['decode_s']:4.1f} %),"
            f" waits {100 * total['wait_s'] / total['decode_s']:4.1f} %"
        )
    print("identical:", all(a["tokens"] == b["tokens"] for a, b in zip(first, second, strict=True)))
    print_head(
        "category", "answers", "tokens/s, second over first", "from", "to", "tokens a pass, first", "second"
    )
    for category in [*dict.fromkeys(a["category"] for a in first), "all"]:
        both = [p for p in zip(first, second, strict=True) if category in (p[0]["category"], "all")]
        gains = [a["decode_s"] / b["decode_s"] for a, b in both]
        whole = sum(a["decode_s"] for a, _ in both) / sum(b["decode_s"] for _, b in both)
        yields = [sum(len(p[i]["tokens"]) for p in both) / sum(p[i]["passes"] for p in both) for i in (0, 1)]
        print(
            f"| {category} | {len(both)} | {whole:.2f} | {min(gains):.2f} | {max(gains):.2f}"
            f" | {yields[0]:.2f} | {yields[1]:.2f} |"
        )


if __name__ == "__main__":
    main()
