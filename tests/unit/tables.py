"""Targets and drafters that are tables from texts to logits, and passes of every rule with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from hypothesis import strategies as st

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.methods import DecodingMethod, method_for
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sampled_trees import Drawing, grow_drawn
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.tree_search import grow
from edgespec.speculation.verification.base import DraftedTree
from tests.unit.chance import ScriptedDraws, outcomes
from tests.unit.strategies import text_of

Text = tuple[int, ...]
Table = Callable[[Text], FloatArray]

FILTERED = GenerationConfig(
    temperature=0.7, top_k=3, top_p=0.95, min_p=0.02, repeat_penalty=1.3, presence_penalty=0.4
)
PROMPT = (1, 0)


def table(rows: Callable[[Text], Sequence[float]]) -> Table:
    """Logits from probabilities by text."""

    @cache
    def logits(text: Text) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(rows(text), dtype=np.float32))

    return logits


class TableDrafter(Drafter):
    """A drafter whose model is a table, and which can be sampled from."""

    name = "table"

    def __init__(self, logits: Table) -> None:
        self.logits = logits
        self._text: Text = ()
        self._tokens: dict[int, Text] = {}

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        self._start(text)

        def expand(frontier: Frontier) -> Children:
            logits = self._read(frontier)[1]
            positions = [len(text) + int(depth) for depth in frontier.depths]
            return ranking.best(logits, positions, limits.branching)

        return grow(text[-1], expand, limits)

    def draw(self, text: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        self._start(text)
        return grow_drawn(text[-1], self._read, drawing, width)

    def _start(self, text: Sequence[int]) -> None:
        self._text, self._tokens = tuple(text), {}

    def _read(self, frontier: Frontier) -> tuple[list[int], FloatArray]:
        for node, token, parent in zip(frontier.nodes, frontier.tokens, frontier.parents, strict=True):
            self._tokens[int(node)] = (*self._tokens[int(parent)], int(token)) if parent >= 0 else ()
        rows = [self.logits((*self._text, *self._tokens[int(node)])) for node in frontier.nodes]
        return list(range(len(rows))), np.stack(rows)

    def close(self) -> None: ...


class PickingDrafter(Drafter):
    """A drafter without a distribution: it always guesses the same texts."""

    name = "picker"

    def __init__(self, guesses: Sequence[Sequence[int]]) -> None:
        self._guesses = guesses

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        paths = [(guess[: limits.depth], [0.0] * len(guess[: limits.depth])) for guess in self._guesses]
        return TokenTree.from_paths(text[-1], paths).trimmed(limits.budget, limits.leaves)

    def close(self) -> None: ...


def one_pass(
    method: DecodingMethod, drafter: Drafter, target: Table, limits: TreeLimits, start: Text = PROMPT
) -> tuple[Text, int]:
    """Tokens that a pass adds to a text, and the number of accepted drafted ones."""
    text = list(start)
    guess = method.drafting.draft(drafter, text, limits)
    before = tuple(text[:-1])
    logits = np.stack([target((*before, *text_of(guess.tree, node))) for node in range(len(guess.tree))])
    accepted = method.accept(guess, logits, text)
    assert len(guess.tree) <= limits.budget
    assert len(text) == len(start) + len(accepted.path)
    assert list(accepted.path) == guess.tree.path(accepted.path[-1])
    return tuple(text[len(start) :]), len(accepted.path) - 1


def mean_accepted(rule: str, target: Table, drafter: Drafter, limits: TreeLimits, vocabulary: int) -> float:
    """Drafted tokens that a pass accepts on average at temperature 1."""
    config = GenerationConfig(temperature=1, verify=rule)

    def run(draws: ScriptedDraws) -> int:
        method = method_for(config, vocabulary, 0, drafter, draws=lambda *_: draws)
        return one_pass(method, drafter, target, limits)[1]

    return sum(accepted * weight for accepted, weight in outcomes(run))


def limits(budget: int, depth: int = 2) -> TreeLimits:
    return TreeLimits(budget=budget, depth=depth, branching=3)


def fixed(*rows: Sequence[float]) -> Table:
    """A few distributions, shared by all texts, by length."""
    return table(lambda text: rows[len(text) % len(rows)])


KINDS = ("smooth", "peaked", "zeros", "one", "even")


def random_table(seed: int, vocabulary: int, kind: str) -> Table:
    def row(text: Text) -> Sequence[float]:
        rng = np.random.default_rng([seed, *text])
        weights = rng.exponential(size=vocabulary) ** (4 if kind == "peaked" else 1)
        if kind == "zeros":
            weights *= rng.random(vocabulary) < 0.6
        if kind == "one":
            weights *= 0
        if kind == "even":
            weights[:] = 1
        weights[rng.integers(vocabulary)] += 0.1 if kind != "even" else 0
        result: Sequence[float] = (weights / weights.sum()).tolist()
        return result

    return table(row)


@st.composite
def pairs(draw: st.DrawFn, most: int = 3) -> tuple[Table, Table, int]:
    """Target, drafter, vocabulary; often the drafter is the target in some texts."""
    vocabulary = draw(st.integers(2, most))
    seeds = draw(st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)))
    target, other = (random_table(seed, vocabulary, draw(st.sampled_from(KINDS))) for seed in seeds)
    if draw(st.booleans()):
        return target, lambda text: target(text) if text[-1] else other(text), vocabulary
    return target, other, vocabulary
