"""Measure sources without a model: each alone and merged with a drafter, by category, size and sampling.

    python -m benchmarks.sources --results sources.jsonl

Trees are led along texts of the target, as in benchmarks.trees: tokens a pass are counted, so other programs
do not matter. Everything kept of texts and passes is forgotten before each question; what is learned about
the sources' chances continues. A run that was stopped resumes; `--minutes` stops it by itself.

A person's own files are no part of this: what they add depends on the files.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import trees
from benchmarks.harness import parser_of, print_head
from benchmarks.workload import read_lines
from edgespec.machine.probe import usable_cores

_NAMES = {
    "text": "the text",
    "recycled": "recycling",
    "all": "both",
    "calibrated": "drafter",
    "calibrated+text": "drafter and the text",
    "calibrated+recycled": "drafter and recycling",
    "calibrated+all": "drafter and both",
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", type=Path, default=Path(__file__).with_name("quoting.jsonl"))
    parser.add_argument("--results", type=Path, default=Path("sources.jsonl"))
    parser.add_argument("--pair", choices=trees.PAIRS, default="drop-18-21")
    parser.add_argument("--methods", nargs="+", choices=_NAMES, default=list(_NAMES))
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 60])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--minutes", type=float, default=1e6, help="start nothing new after so long")
    options = parser.parse_args()
    options.pairs = [options.pair]
    options.bf16, options.whole, options.forget = False, True, True
    trees.run(options)
    lines = [line for line in read_lines(options.results) if "runs" in line]
    for temperature in options.temperatures:
        _show([line for line in lines if line["temperature"] == temperature], temperature, options.budgets)


def _show(lines: list[dict[str, Any]], temperature: float, budgets: list[int]) -> None:
    """A table of one temperature, with a row for each source and each number of nodes."""
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    passes: dict[tuple[str, str], int] = defaultdict(int)
    for line in lines:
        for name, run in line["runs"].items():
            for category in (line["category"], "all"):
                tokens[name, category] += run["tokens"]
                passes[name, category] += run["passes"]
    categories = [*dict.fromkeys(line["category"] for line in lines), "all"]
    print(f"\nTemperature {temperature:g}, {len(lines)} texts, tokens per pass:\n")
    print_head("sources", "nodes", *categories)
    for method in dict.fromkeys(name.rpartition(" ")[0] for name, _ in tokens):
        for budget in budgets:
            name = f"{method} {budget}"
            if passes[name, "all"]:
                cells = [f"{tokens[name, c] / passes[name, c]:.2f}" for c in categories]
                print(f"| {_NAMES[method]} | {budget} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
