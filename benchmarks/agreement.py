"""Passes and tokens a pass of a pair, for trees of fixed sizes: how well the drafts agree with the target.

    python -m benchmarks.agreement TARGET DRAFTER [--nodes 6 16 60] [--count 6] [--tokens 64] [--against FILE]

Times nothing, so any machine gives the same figures, however busy it is. Run it before and after a change to
drafting, ranking, sources or kernels; docs/benchmarks.md has the figures of the real pair. Answers are greedy
and exact, each by a newly loaded pair that has learned nothing, and half of the questions are about code. The
last line is one JSON object; `--against` takes a file that ends with one, and exits with 1 if a size lost
over 1 % of the tokens a pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import edgespec
from benchmarks.harness import parser_of, print_head
from benchmarks.pairs import CODE, questions_of
from edgespec.generation.config import GenerationConfig

_LOSS = 0.01  # share of the tokens a pass that needs a reason


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[6, 16, 60])
    parser.add_argument("--count", type=int, default=6, help="questions of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--against", type=Path, help="what an earlier run printed")
    options = parser.parse_args()
    figures = measured(options)
    earlier = json.loads(options.against.read_text().splitlines()[-1]) if options.against else {}
    print_head("text", "nodes", "answers", "passes", "tokens a pass", "before")
    lost = False
    for key, (answers, tokens, passes) in figures.items():
        kind, nodes = key.split()
        before = earlier[key][1] / earlier[key][2] if key in earlier else None
        lost |= before is not None and tokens / passes < (1 - _LOSS) * before
        shown = "" if before is None else f"{before:.2f}"
        print(f"| {kind} | {nodes} | {answers} | {passes} | {tokens / passes:.2f} | {shown} |")
    print(json.dumps(figures))
    raise SystemExit(int(lost))


def measured(options: argparse.Namespace) -> dict[str, list[int]]:
    """Answers, tokens and passes by kind of text and nodes."""
    figures: dict[str, list[int]] = {}
    texts: dict[str, list[int]] = {}
    config = GenerationConfig(max_tokens=options.tokens, temperature=0)
    for question in questions_of(None, options.count):
        kind = "code" if question.category in CODE else "prose"
        for nodes in options.nodes:
            # A new engine, because what a drafter keeps of other answers is no property of the change.
            with edgespec.load(
                options.target,
                draft=options.drafter,
                tree_budget=nodes,
                context=1024,
                exact=True,
                learn=False,
            ) as engine:
                made = engine.generate(question.text, config)
            expected = texts.setdefault(question.identifier, list(made.tokens))
            assert list(made.tokens) == expected, f"{question.identifier}: {nodes} nodes change the text"
            row = figures.setdefault(f"{kind} {nodes}", [0, 0, 0])
            for place, more in enumerate((1, len(made.tokens), len(made.passes))):
                row[place] += more
    return figures


if __name__ == "__main__":
    main()
