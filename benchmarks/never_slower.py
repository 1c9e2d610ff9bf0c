"""Trees sized while running against plain decoding, also where drafting cannot pay.

    python -m benchmarks.never_slower [--rounds 3] [--tokens 128]

The embedded model in memory, where a drafter about as large as its target is more trouble than help. Every
prompt is answered plainly and with each drafter, in turn; a ratio above 0.97 keeps the promise that auto is
never more than 3 % slower.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack

import edgespec
from benchmarks.workload import PROMPTS, dropped_four, q4_0, smollm2
from edgespec.generation.config import GenerationConfig

DRAFTERS = {
    "prompt lookup": "lookup",
    "Q4_0 requantized": str(q4_0()),
    "layers 14, 17, 20, 23 dropped": str(dropped_four()),
}


def main() -> None:
    options = _parse()
    with ExitStack() as stack:
        plain = stack.enter_context(edgespec.load(smollm2(), draft="none", exact=False, learn=False))
        engines = {
            name: stack.enter_context(edgespec.load(smollm2(), draft=draft, exact=False, learn=False))
            for name, draft in DRAFTERS.items()
        }
        print("| drafter | temperature | against plain, median | from | to | tokens a pass | nodes a pass |")
        print("|---|---|---|---|---|---|---|")
        for temperature in options.temperatures:
            _compare(plain, engines, temperature, options)


def _compare(
    plain: edgespec.Engine,
    engines: dict[str, edgespec.Engine],
    temperature: float,
    options: argparse.Namespace,
) -> None:
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(options.rounds):
        for engine in engines.values():
            engine.forget_texts()  # the same prompts come again
        for prompt in PROMPTS[: options.prompts]:
            config = GenerationConfig(max_tokens=options.tokens, temperature=temperature, seed=round_)
            expected = plain.generate(prompt, config).tokens_per_second
            for name, engine in engines.items():
                ratios[name].append(engine.generate(prompt, config).tokens_per_second / expected)
    for name, engine in engines.items():
        last = engine.last_generation
        assert last is not None
        low, high = min(ratios[name]), max(ratios[name])
        print(
            f"| {name} | {temperature} | {statistics.median(ratios[name]):.3f} | {low:.3f} | {high:.3f} "
            f"| {last.tokens_per_pass:.2f} | {last.nodes_per_pass:.1f} |"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    return parser.parse_args()


if __name__ == "__main__":
    main()
