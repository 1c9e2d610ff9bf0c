"""Are rows that a pass has left better spent on a lookahead window or on a larger tree?

    python -m benchmarks.lookahead [--prompts 10] [--tokens 64] [--ways 16 32 16+16x1 16+8x2]

Lookahead decoding (Fu et al. 2024) has the target guess tokens further on in parallel (Jacobi iteration), and
keeps the n-grams that come up in a pool to draft from. Here the window is a part of the tree: its first line
is a chain below the root, and the later lines hang from it diagonally. The pool is the table that recycles
what the target said after every node, whichever it was. A way is named NODES, or NODES+WINDOWxLINES.

The default model answers every question in each way in turn, greedily and without a drafter, with everything
forgotten before. Passes are counted, so other programs do not matter.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import edgespec
from benchmarks.workload import smollm2
from edgespec.bench.rows.workload import balanced, read_questions
from edgespec.generation.config import GenerationConfig
from edgespec.machine.probe import usable_cores
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.text import TextSource
from edgespec.speculation.tree import FloatArray, TokenTree

_UNLIKELY = -100.0  # log-probability of guesses: they are read for what follows them


class _LookaheadDrafter(ProposingDrafter):
    """Adds a lookahead window to trees that grow from the text and from recycled tokens.

    Args:
        nodes: of a tree without the window.
        window: tokens of a line.
        lines: 0 for no window.
    """

    def __init__(self, nodes: int, window: int, lines: int) -> None:
        super().__init__([TextSource(), RecycledSource()])
        self._nodes, self._window = nodes, window
        self._lines: list[list[int]] = [[] for _ in range(lines)]
        self._ends: list[int] = []  # the nodes whose outputs are the next last line
        self._length = 0  # of the text that the window was last read behind
        self._random = random.Random(0)

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree, and the window below its root."""
        tree = super().draft(text, replace(limits, budget=self._nodes), ranking)
        if not self._lines:
            return tree
        # The lines have gone on by one token already.
        passed = max(len(text) - self._length - 1, 0)
        for line in self._lines:
            del line[:passed]
            line.extend(self._random.choice(text) for _ in range(self._window - len(line)))
        self._length = len(text)
        return self._with_window(tree, limits.depth)

    def _with_window(self, tree: TokenTree, depth: int) -> TokenTree:
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        scores = tree.logprobs.tolist()
        pairs = zip(parents, tokens, strict=True)
        children = {pair: node for node, pair in enumerate(pairs)}

        def add(parent: int, token: int) -> int:
            if (parent, token) not in children:
                children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                scores.append(_UNLIKELY + scores[parent])
            return children[parent, token]

        self._ends = []
        first = 0
        for place in range(min(self._window, depth - len(self._lines) + 1)):
            node = first = add(first, self._lines[0][place])
            for line in self._lines[1:]:
                node = add(node, line[place])
            self._ends.append(node)
        return TokenTree.build(tokens, parents, scores)

    def observe(self, text: Sequence[int], tree: TokenTree, logits: FloatArray) -> None:
        super().observe(text, tree, logits)
        if self._lines:
            self._lines = [*self._lines[1:], logits[self._ends].argmax(-1).tolist() if self._ends else []]
            self._ends = []

    def forget_texts(self) -> None:
        super().forget_texts()
        self._lines = [[] for _ in self._lines]
        self._length = 0


def main() -> None:
    options = _parse()
    drafters = {way: _drafter(way) for way in options.ways}
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    passes: dict[tuple[str, str], int] = defaultdict(int)
    nodes: dict[str, int] = defaultdict(int)
    questions = balanced(read_questions(options.workload), options.prompts)
    with edgespec.load(
        smollm2(),
        draft="lookup",
        tree_budget=60,
        exact=True,
        context=1024,
        threads=options.threads,
        learn=False,
    ) as engine:
        for question in questions:
            written = []
            for way, drafter in drafters.items():
                engine.drafter = drafter
                engine.forget_texts()
                answer = engine.generate(question.text, GenerationConfig(max_tokens=options.tokens))
                written.append(answer.tokens)
                nodes[way] += sum(record.nodes for record in answer.passes)
                for category in (question.category, "all"):
                    tokens[way, category] += len(answer.tokens)
                    passes[way, category] += len(answer.passes)
            assert all(text == written[0] for text in written), "drafts change the speed alone"
            print(f"{question.category}: {len(written[0])} tokens", flush=True)
    categories = [*dict.fromkeys(question.category for question in questions), "all"]
    print("| way | nodes a pass | " + " | ".join(categories) + " |")
    print("|---|---|" + "---|" * len(categories))
    for way in drafters:
        cells = [f"{tokens[way, category] / passes[way, category]:.2f}" for category in categories]
        print(f"| {way} | {nodes[way] / passes[way, 'all']:.1f} | " + " | ".join(cells) + " |")


def _drafter(way: str) -> _LookaheadDrafter:
    nodes, _, window = way.partition("+")
    width, _, lines = window.partition("x")
    return _LookaheadDrafter(int(nodes), int(width or 0), int(lines or 0))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", type=Path, default=Path(__file__).with_name("quoting.jsonl"))
    parser.add_argument("--ways", nargs="+", default=["16", "32", "16+16x1", "16+8x2", "58", "16+14x3"])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=usable_cores())
    return parser.parse_args()


if __name__ == "__main__":
    main()
