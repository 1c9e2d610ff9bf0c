"""Tokens a pass of every rule of verification, at equal places of equal texts.

    python -m benchmarks.rules [--target big.gguf --drafter small.gguf]

The target samples texts. At places along each of them every rule drafts a tree and judges it, and the text
continues unchanged: all rules meet the same contexts, and draw with the same numbers there. `specinfer` and
`recursive` draw trees of one shape.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import edgespec
from benchmarks.harness import parser_of, print_head
from benchmarks.workload import PROMPTS, dropped, q4_0, smollm2
from edgespec.engine.sequence import SequenceTree, TextSequence
from edgespec.generation.config import GenerationConfig
from edgespec.machine.probe import usable_cores
from edgespec.speculation.draws import SeededDraws
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import DecodingMethod, method_for
from edgespec.speculation.policies import tree_policy

RULES = ("specexec", "shared-noise", "speculative", "block", "specinfer", "spectr", "recursive")
PAIRS = {"q4_0": q4_0, "drop-18-21": dropped}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=Path, default=smollm2())
    parser.add_argument("--drafter", type=Path, help="the only one, instead of those of --pairs")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=3, help="tokens from one place to the next")
    parser.add_argument("--judged", type=int, default=4, help="how often a tree is judged")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    options = parser.parse_args()
    print_head("drafter", "temperature", *RULES, "recursive - specinfer")
    given = options.drafter
    drafters = {given.stem: given} if given else {pair: PAIRS[pair]() for pair in options.pairs}
    for pair, drafter in drafters.items():
        with edgespec.load(
            options.target,
            draft=drafter,
            drafter="model",
            tree_budget=options.budget,
            exact=False,
            context=512,
            threads=options.threads,
            learn=False,
        ) as engine:
            for temperature in options.temperatures:
                found = measured(engine, options, temperature)
                gained = [a - b for a, b in zip(found["recursive"], found["specinfer"], strict=True)]
                cells = [*(found[rule] for rule in RULES), gained]
                figures = " | ".join(f"{_mean(of):.2f} ± {_error(of):.2f}" for of in cells)
                print(f"| {pair} | {temperature:g} | {figures} |", flush=True)
                means = {rule: _mean(of) for rule, of in found.items()}
                print(json.dumps({"pair": pair, "temperature": temperature, "places": len(gained)} | means))


def measured(
    engine: edgespec.Engine, options: argparse.Namespace, temperature: float
) -> dict[str, list[float]]:
    """Tokens that a pass of each rule adds, by place."""
    n_vocab = engine.target.model.vocabulary.n_tokens
    policy = tree_policy()
    found: dict[str, list[float]] = {rule: [] for rule in RULES}
    for number, prompt in enumerate(PROMPTS[: options.prompts]):
        config = GenerationConfig(temperature=temperature, seed=number, max_tokens=options.tokens)
        tokens = engine.encoder.encode(prompt)
        answer = engine.generate(tokens, config).tokens
        for at in range(0, len(answer), options.every):
            text = [*tokens, *answer[:at]]
            for rule in RULES:
                # Noise that the text was not written with.
                seeds = [1000 + options.judged * at + i for i in range(options.judged)]
                methods = [
                    method_for(
                        config.with_(verify=rule),
                        n_vocab,
                        seed,
                        engine.drafter,
                        policy=policy,
                        draws=partial(SeededDraws, seed),
                    )
                    for seed in seeds
                ]
                found[rule].append(tokens_of(engine, methods, options.budget, text))
    return found


def tokens_of(engine: edgespec.Engine, methods: list[DecodingMethod], budget: int, text: list[int]) -> float:
    """Tokens that a pass adds to a text, a mean over the methods, which differ in what chance decides.

    The first of them drafts; where the draft knows the target's noise, it alone judges.
    """
    limits = TreeLimits(budget, depth=budget - 1)
    sequence = TextSequence(text)
    engine.target.prefill(sequence)
    guess = methods[0].drafting.draft(engine.drafter, text, limits)
    trees = [SequenceTree(sequence, guess.tree)]
    logits = engine.target.verify(trees).logits[0].copy()
    engine.target.commit(trees, [[0]])
    shared = methods[0].rule.name == "shared-noise"
    added: list[int] = []
    for method in methods[:1] if shared else methods:
        longer = list(text)
        added.append(len(method.accept(guess, logits, longer).path))
        if shared:
            engine.drafter.learn(longer)
    return _mean(added)


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values))


def _error(values: list[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    main()
