"""Draft steps with and without reading what sources are sure of, on the same answers.

    python -m benchmarks.cascade [--budget 32] [--prompts 10] [--tokens 40]

Both ways answer every question in turn, each with chances of its own. Steps, rows and passes are counted, so
other programs do not matter.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import edgespec
from benchmarks.trees import PAIRS
from benchmarks.workload import smollm2
from edgespec.bench.rows.workload import balanced, read_questions
from edgespec.drafters.model import ModelDrafter
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.machine.probe import usable_cores
from edgespec.speculation.policies import tree_policy


@dataclass
class _Sums:
    """Costs of answers."""

    tokens: int = 0
    passes: int = 0
    steps: int = 0
    rows: int = 0

    def __str__(self) -> str:
        return " | ".join(f"{n / self.passes:.2f}" for n in (self.tokens, self.steps, self.rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", type=Path, default=Path(__file__).with_name("quoting.jsonl"))
    parser.add_argument("--pair", choices=PAIRS, default="drop-18-21")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    sums: dict[tuple[str, bool], _Sums] = defaultdict(_Sums)
    identical = True
    with edgespec.load(
        smollm2(),
        draft=PAIRS[options.pair](),
        tree_budget=options.budget,
        exact=True,
        context=1024,
        threads=options.threads,
        learn=False,
    ) as engine:
        drafter = engine.drafter
        assert isinstance(drafter, ModelDrafter)
        policies = {way: tree_policy() for way in (False, True)}
        for number, question in enumerate(balanced(read_questions(options.workload), options.prompts)):
            config = GenerationConfig(max_tokens=options.tokens, temperature=options.temperature, seed=number)
            texts = []
            for way, policy in policies.items():
                engine.forget_texts()
                engine.target.rewind(0)
                drafter.forget()
                engine.decisions, engine.policy = Decisions(cascade=way), policy
                answer = engine.generate(question.text, config)
                texts.append(answer.tokens)
                for category in (question.category, "all"):
                    of = sums[category, way]
                    of.tokens += len(answer.tokens)
                    of.passes += len(answer.passes)
                    of.steps += sum(record.draft_steps for record in answer.passes)
                    of.rows += sum(record.draft_rows for record in answer.passes)
            identical &= texts[0] == texts[1]
    print("identical:", identical)
    print("| category | tokens a pass, without | draft steps | rows | with | draft steps | rows |")
    print("|---|---|---|---|---|---|---|")
    for category in dict.fromkeys(category for category, _ in sums):
        print(f"| {category} | {sums[category, False]} | {sums[category, True]} |")


if __name__ == "__main__":
    main()
