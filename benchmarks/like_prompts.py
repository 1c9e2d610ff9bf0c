"""Batches of like prompts, and of unlike ones, with and without drafts from earlier answers.

    python -m benchmarks.like_prompts TARGET DRAFTER|lookup [--kinds letters tests unlike] [--parallel 1]
        [--nodes N] [--count 12] [--tokens 128] [--sampling 0] [--repetitions 1]

The pair is loaded once. Both ways answer the same batch one after another, and begin with nothing learned.
Seconds are those of the batch, prompts included, which the cache holds for all but a first, short batch.
Texts must be equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import edgespec
from benchmarks.harness import parser_of, print_head
from edgespec.bench.rows.preparation import own_questions
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.sources.answers import Answers

_NAMES = "Okafor Lindqvist Moreau Tanaka Novak Haddad Silva Byrne Kowalski Petrov Adeyemi Rossi"
_GOODS = "armchair shelf lamp carpet chair wardrobe desk bed mirror curtain rack bench"
_FUNCTIONS = "add subtract multiply divide power modulo maximum minimum average median factorial gcd"


def prompts_of(kind: str, count: int) -> list[str]:
    """The prompts of a batch: letters or tests, which are alike, or the questions of `bench`."""
    if kind == "letters":
        letter = "Write a short, polite letter to {}: the {} arrives a week late; 10 % off the next order."
        pairs = zip(_NAMES.split(), _GOODS.split(), strict=True)
        return [letter.format(*pair) for pair in pairs][:count]
    if kind == "tests":
        test = "Write pytest tests for the function {} in the module calculator. Only code, no explanation."
        return [test.format(function) for function in _FUNCTIONS.split()][:count]
    return [question.text for question in own_questions()[:count]]


def answered(
    engine: Engine, prompts: Sequence[str], config: GenerationConfig, options: argparse.Namespace, reuse: bool
) -> tuple[float, float, list[list[int]]]:
    """Seconds of a batch, tokens a pass, and the tokens of its answers."""
    engine.speculator.earlier = Answers() if reuse else None
    engine.forget_texts()
    engine.set_tree_budget(options.nodes)
    start = time.perf_counter()
    answers = engine.generate_many(prompts, config, parallel=options.parallel)
    seconds = time.perf_counter() - start
    passes = [one for answer in answers for one in answer.passes]
    return seconds, sum(p.accepted + 1 for p in passes) / len(passes), [answer.tokens for answer in answers]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--kinds", nargs="+", default=["letters", "tests", "unlike"])
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--nodes", type=int, help="of every tree; without it, as many as pay")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sampling", type=float, default=0.0, help="temperature")
    parser.add_argument("--repetitions", type=int, default=1)
    options = parser.parse_args()
    config = GenerationConfig(max_tokens=options.tokens, temperature=options.sampling, seed=1)
    print_head("prompts", "tokens a pass", "with earlier answers", "seconds", "with them", "faster")
    with edgespec.load(
        options.target,
        draft=options.drafter,
        context=2048,
        parallel=options.parallel,
        exact=True,
        learn=False,
    ) as engine:
        for kind in options.kinds:
            prompts = prompts_of(kind, options.count)
            engine.generate_many(prompts, config.with_(max_tokens=4), parallel=options.parallel)
            for number in range(options.repetitions):
                order = (False, True) if number % 2 == 0 else (True, False)
                made = {reuse: answered(engine, prompts, config, options, reuse) for reuse in order}
                (plain_s, plain, texts), (seconds, tokens, others) = made[False], made[True]
                assert texts == others, f"{kind}: earlier answers change the text"
                print(
                    f"| {kind} | {plain:.2f} | {tokens:.2f} | {plain_s:.1f} | {seconds:.1f} | "
                    f"{plain_s / seconds:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
