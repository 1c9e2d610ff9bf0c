"""Measure the cost of growing a tree beside the drafter's own decode calls.

    python -m benchmarks.drafting

A drafter is led along a text of the target's: a tree where every pass would begin, and the next one behind
the tokens that the text took of it. The figure is seconds to grow all trees and to learn from them, over the
seconds of them inside llama_decode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace

import edgespec
from benchmarks.harness import parser_of, print_head
from benchmarks.overhead import timed_decodes
from benchmarks.workload import PROMPTS, dropped, q4_0
from edgespec.drafters.model import ModelDrafter
from edgespec.generation.config import GenerationConfig
from edgespec.machine.probe import usable_cores
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import tree_policy


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--policies", nargs="+", default=["calibrated", "specexec", "eagle2"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    table = []
    print_head(
        "drafter", "temperature", "tree", "growing over decoding", "growing, ms", "draft steps", "rows known"
    )
    for name, draft in (("q4_0", q4_0()), ("drop-18-21", dropped())):
        with edgespec.load(
            draft=draft,
            tree_budget=options.budget,
            exact=False,
            tree_width=options.budget,
            threads=options.threads,
            learn=False,
        ) as engine:
            for temperature in options.temperatures:
                for policy, figures in _measured(engine, options, temperature).items():
                    print(
                        f"| {name} | {temperature:g} | {policy} | {figures['ratio']:.3f} "
                        f"| {figures['ms']:.1f} | {figures['steps']:.1f} | {figures['known']:.1%} |"
                    )
                    table.append({"drafter": name, "temperature": temperature, "tree": policy} | figures)
    print(json.dumps(table))


@dataclass(frozen=True)
class _Pass:
    """One tree: seconds to grow it and to learn from it, those inside llama_decode, and draft steps."""

    seconds: float
    decoding_s: float
    steps: int
    root_was_known: bool


def _measured(
    engine: edgespec.Engine, options: argparse.Namespace, temperature: float
) -> dict[str, dict[str, float]]:
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    policies = {name: tree_policy(name) for name in options.policies}
    passes: dict[str, list[_Pass]] = {name: [] for name in policies}
    for seed, prompt in enumerate(PROMPTS[: options.prompts]):
        config = GenerationConfig(temperature=temperature, seed=seed, max_tokens=options.tokens)
        tokens = engine.encoder.encode(prompt)
        answer = engine.generate(tokens, config).tokens
        for name, policy in policies.items():
            ranking = policy.ranking(config, GumbelNoise(seed, engine.target.model.vocabulary.n_tokens))
            limits = policy.clamp(TreeLimits(options.budget, depth=16, width=max(8, options.budget // 8)))
            limits = replace(limits, expansion=policy.expansion(config))
            text = [*tokens]
            ahead = list(answer)
            drafter.draft(text, limits, ranking)  # reads the prompt
            while len(ahead) > limits.depth:
                text.append(ahead.pop(0))
                with timed_decodes() as decodes:
                    begun = time.perf_counter()
                    tree = drafter.draft(text, limits, ranking)
                    seconds = time.perf_counter() - begun
                node: int | None = 0
                while node is not None and (node := tree.child(node, ahead[0])) is not None:
                    text.append(ahead.pop(0))
                begun = time.perf_counter()
                drafter.learn([*text, ahead[0]])
                seconds += time.perf_counter() - begun
                passes[name].append(_Pass(seconds, sum(decodes), drafter.steps, drafter.root_was_known))
    return {
        name: {
            "ratio": sum(one.seconds for one in of) / sum(one.decoding_s for one in of),
            "ms": 1000 * statistics.median(one.seconds for one in of),
            "steps": statistics.mean(one.steps for one in of),
            "known": statistics.mean(one.root_was_known for one in of),
        }
        for name, of in passes.items()
    }


if __name__ == "__main__":
    main()
