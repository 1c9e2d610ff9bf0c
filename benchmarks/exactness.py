"""Is the text the same, token for token, with any drafter and any tree?

    python -m benchmarks.exactness                  # the whole table
    python -m benchmarks.exactness --prompts 4 --tokens 100
    python -m benchmarks.exactness --no-exact       # how often, and by how much, it differs otherwise

Plain decoding is compared with every drafter and budget, greedy and sampled. A context just longer than
the answer makes the cache run out of tail and be compacted on the way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import edgespec
from benchmarks.harness import parser_of
from benchmarks.workload import PROMPTS, dropped, q4_0, smollm2
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation


@dataclass
class Row:
    """One line of the table."""

    drafter: str
    budget: int
    temperature: float
    identical: int
    prompts: int
    tokens_per_pass: float
    compactions: int
    largest_gap: float


def main() -> None:
    options = _parse()
    model = options.model or smollm2()
    drafters = {"none": "none", "lookup": "lookup"}
    if options.model is None:
        drafters |= {"q4_0": str(q4_0()), "drop-18-21": str(dropped())}
    for pair in options.draft:
        name, _, path = pair.partition("=")
        drafters[name] = path
    if options.only:
        drafters = {name: path for name, path in drafters.items() if name in ("none", *options.only)}
    prompts = PROMPTS[: options.prompts]
    configs = [
        GenerationConfig(temperature=t, seed=7, max_tokens=options.tokens) for t in options.temperatures
    ]
    rows: list[Row] = []
    plain: dict[tuple[float, str], Generation] = {}
    for name, draft in drafters.items():
        for budget in options.budgets if name != "none" else [1]:
            start = time.perf_counter()
            with edgespec.load(
                model, draft=draft, tree_budget=budget, exact=options.exact, context=options.context
            ) as engine:
                for config in configs:
                    row = _row(engine, name, budget, config, prompts, plain)
                    rows.append(row)
                    print(
                        f"{name:>12} budget {budget:>3} temperature {config.temperature}: "
                        f"{row.identical}/{row.prompts} identical, {row.tokens_per_pass:.2f} tokens a pass, "
                        f"{row.compactions} compactions, largest gap {row.largest_gap:.3g}",
                        file=sys.stderr,
                    )
            print(f"{'':>12} {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(_table(rows))
    print(json.dumps({"exact": options.exact, "model": Path(model).name, "rows": [asdict(r) for r in rows]}))


def _row(
    engine: Engine,
    name: str,
    budget: int,
    config: GenerationConfig,
    prompts: tuple[str, ...],
    plain: dict[tuple[float, str], Generation],
) -> Row:
    identical, per_pass, gaps = 0, [], [0.0]
    before = engine.target.cache.compactions
    engine.forget_texts()  # what was learned from these very prompts before is no merit
    for prompt in prompts:
        engine.target.rewind(0)  # every answer starts from an empty cache
        answer = engine.generate(prompt, config)
        key = (config.temperature, prompt)
        reference = plain.setdefault(key, answer)
        identical += answer.tokens == reference.tokens
        per_pass.append(answer.tokens_per_pass)
        if answer.tokens != reference.tokens and config.greedy:
            gaps.append(_gap(engine, prompt, answer.tokens, reference.tokens))
    return Row(
        name,
        budget,
        config.temperature,
        identical,
        len(prompts),
        float(np.mean(per_pass)),
        engine.target.cache.compactions - before,
        max(gaps),
    )


def _gap(engine: Engine, prompt: str, tokens: list[int], reference: list[int]) -> float:
    """Logit difference between the two choices where the texts part: a near-tie, if all is well."""
    at = next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), None)
    if at is None:
        return 0.0
    from edgespec.engine.sequence import SequenceTree, TextSequence
    from edgespec.speculation.tree import TokenTree

    text = [*engine.encoder.encode(prompt), *reference[:at]]
    sequence = TextSequence(text)
    engine.target.prefill(sequence)
    trees = [SequenceTree(sequence, TokenTree.root_only(text[-1]))]
    logits = engine.target.verify(trees).logits[0][0]
    gap = abs(float(logits[tokens[at]] - logits[reference[at]]))
    engine.target.commit(trees, [[0]])
    return gap


def _table(rows: list[Row]) -> str:
    lines = [
        "| drafter | budget | temperature | identical | tokens a pass | compactions | largest logit gap |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        f"| {r.drafter} | {r.budget} | {r.temperature} | {r.identical} of {r.prompts} "
        f"| {r.tokens_per_pass:.2f} | {r.compactions} | {r.largest_gap:.3g} |"
        for r in rows
    ]
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="target (default: the embedded model, with its drafters)")
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=PATH", help="a further drafter")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these drafters only")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 8, 32, 60])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
