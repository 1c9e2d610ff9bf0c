"""The drafter's keys and values in F16 and in Q8_0: tokens a pass, and what a draft step takes.

    python -m benchmarks.draft_cache yields [--results draft-cache.jsonl]
    python -m benchmarks.draft_cache steps [--lengths 256 1024 3072]

`yields` leads trees along texts of the target, as benchmarks.trees does, with both caches in turn; each
learns by itself, from nothing. These are counts, so other programs do not matter. `steps` times decodes of
the drafter behind texts of several lengths, both caches in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.replay import Contexts, Run, Walk, replay
from benchmarks.trees import PAIRS, Texts, limits_of, new_policy, questions_of
from edgespec.generation.config import GenerationConfig
from edgespec.machine.probe import usable_cores
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.speculation.policies import DEFAULT

CACHES = ("f16", "q8_0")
_ROWS = (1, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("yields", "steps"))
    parser.add_argument("--workload", type=Path, default=Path(__file__).with_name("quoting.jsonl"))
    parser.add_argument(
        "--results", type=Path, default=Path("draft-cache.jsonl"), help="texts are kept beside"
    )
    parser.add_argument("--pair", choices=PAIRS, default="drop-18-21")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 3072])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    (yields if options.action == "yields" else steps)(options)


def yields(options: argparse.Namespace) -> None:
    """Tokens a pass by temperature, size and cache."""
    model = Model(PAIRS[options.pair]())
    contexts = {kv: Contexts(model, n_cells=4096, n_threads=options.threads, kv=kv) for kv in CACHES}
    texts = Texts(options.results.with_suffix(".texts.jsonl"))
    print("| temperature | nodes | " + " | ".join(CACHES) + " |\n|---|---|---|---|")
    for temperature in options.temperatures:
        runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
        policies = {(kv, budget): new_policy(DEFAULT) for kv in CACHES for budget in options.budgets}
        for question in questions_of(options.workload)[: options.prompts]:
            config = GenerationConfig(temperature=temperature)
            prompt, answer = texts.get(question, temperature, options.tokens)
            for kv in CACHES:
                contexts[kv].start(prompt, answer, config, question.number)
                walks = {
                    budget: Walk(contexts[kv], len(prompt), limits_of(policies[kv, budget], budget, config))
                    for budget in options.budgets
                }
                replay(contexts[kv], list(walks.values()))
                for budget, walk in walks.items():
                    runs[kv, budget].append(walk.run)
        for budget in options.budgets:
            means = [
                sum(run.tokens for run in runs[kv, budget]) / sum(run.passes for run in runs[kv, budget])
                for kv in CACHES
            ]
            print(f"| {temperature:g} | {budget} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    texts.close()


def steps(options: argparse.Namespace) -> None:
    """Milliseconds of a decode by length of the text and rows: medians, the caches in turn."""
    model = Model(PAIRS[options.pair]())
    tokens = np.random.default_rng(0).integers(
        0, model.vocabulary.n_tokens, max(options.lengths) + max(_ROWS)
    )
    print("| tokens before | rows | " + " | ".join(f"{kv}, ms" for kv in CACHES) + " |\n|---|---|---|---|")
    for length in options.lengths:
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        contexts = {kv: _behind(model, tokens[:length], kv, options.threads) for kv in CACHES}
        for _ in range(options.rounds):
            for rows in _ROWS:
                for kv, context in contexts.items():
                    begun = time.perf_counter()
                    context.decode(Batch.run(tokens[length : length + rows].tolist(), length, 1, "all"))
                    context.logits()
                    seconds[kv, rows].append(time.perf_counter() - begun)
                    context.remove(0, length)
        for rows in _ROWS:
            cells = " | ".join(f"{1000 * statistics.median(seconds[kv, rows]):.2f}" for kv in CACHES)
            print(f"| {length} | {rows} | {cells} |", flush=True)
        for context in contexts.values():
            context.close()


def _behind(model: Model, tokens: np.ndarray, kv: str, threads: int) -> Context:
    """A context that has read a text."""
    context = Context(
        model,
        n_cells=len(tokens) + max(_ROWS),
        n_rows=512,
        n_outputs=max(_ROWS),
        n_sequences=2,
        n_threads=threads,
        kv=kv,
    )
    for start in range(0, len(tokens), 512):
        context.decode(Batch.run(tokens[start : start + 512].tolist(), start, 1))
    return context


if __name__ == "__main__":
    main()
