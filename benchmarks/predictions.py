"""Predictions of `plan` beside measurements, for some budgets of memory.

    python -m benchmarks.predictions --target big.gguf --draft small.gguf --memory 3GB 4GB 6GB
        [--tokens 48] [--questions 4]

For each budget, a process answers questions of `bench` one after the other, without drafts and with trees
sized while running: the median speed of decoding counts. Predictions are made before the runs and after them,
since passes tell the plan how fast the disk is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import edgespec
from benchmarks.harness import measured_apart, parser_of, print_head
from edgespec.base.progress import no_progress
from edgespec.bench.rows.preparation import own_questions
from edgespec.config import Config
from edgespec.generation.config import GenerationConfig
from edgespec.planning.report.model_report import plan_for

_CONTEXT = 512  # of answers to questions
Speeds = dict[str, float]
"""Tokens per second by the way to run: plain or auto."""


def main() -> None:
    options = _parse()
    if options.one:
        print(json.dumps(_measured(options)))
        return
    print_head("memory", "way", "predicted before", "predicted after", "measured", "after over measured")
    for memory in options.memory:
        before = _predicted(options, memory)
        found = measured_apart("benchmarks.predictions", [*sys.argv[1:], "--one", "--memory", memory])
        found.pop("peak_bytes")
        after = _predicted(options, memory)
        for way, measured in found.items():
            print(
                f"| {memory} | {way} | {before[way]:.3f} | {after[way]:.3f} | {measured:.3f} "
                f"| {after[way] / measured:.2f} |",
                flush=True,
            )


def _predicted(options: argparse.Namespace, memory: str) -> Speeds:
    """The speeds that `plan` expects."""
    asked = Config.of(model=options.target, draft=options.draft, memory=memory, context=_CONTEXT)
    report = plan_for(asked, no_progress)
    return {"plain": report.plain.tokens_per_second, "auto": report.chosen.tokens_per_second}


def _measured(options: argparse.Namespace) -> Speeds:
    return {way: _answering(options, way) for way in ("plain", "auto")}


def _answering(options: argparse.Namespace, way: str) -> float:
    """The median speed of answers to questions."""
    config = GenerationConfig(max_tokens=options.tokens)
    with edgespec.load(
        options.target,
        draft=options.draft if way == "auto" else "none",
        memory=options.memory[0],
        context=_CONTEXT,
        learn=False,
    ) as engine:
        speeds = []
        for question in own_questions()[: options.questions]:
            engine.forget_texts()
            made = engine.generate(question.text, config)
            tokens = sum(one.accepted + 1 for one in made.passes)
            speeds.append(tokens / sum(one.seconds for one in made.passes))
    return statistics.median(speeds)


def _parse() -> Any:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--memory", nargs="+", required=True, help="budgets, such as 4GB")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
