"""Every lossless rule gives the target's own law: all that chance can do is enumerated, through the real code.

A target and a drafter are tables from texts to logits. A method drafts a tree and accepts a path of it in
every possible way, each with its exact probability; what the text is then, and how it goes on by plain
decoding, must have the law of plain decoding from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.generation import GenerationConfig
from edgespec.speculation import drafting, methods
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.drawn import Drawing, grow_drawn
from edgespec.speculation.growth import Children, Frontier, TreeLimits, grow_best_first
from edgespec.speculation.methods import Method, method_for
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sampling import Sampler
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.verification.base import Drafted
from tests.unit.chance import ScriptedDraws, law_of, outcomes
from tests.unit.strategies import text_of

Text = tuple[int, ...]
Table = Callable[[Text], FloatArray]

DRAWN = ["speculative", "block", "specinfer", "spectr", "recursive"]
PICKED = ["speculative", "block"]
PROMPT = (1, 0)
LENGTH = 3  # tokens whose joint law is compared


def table(rows: Callable[[Text], Sequence[float]]) -> Table:
    """Logits from probabilities by text."""

    @cache
    def logits(text: Text) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(rows(text), dtype=np.float32))

    return logits


class TableDrafter(Drafter):
    """A drafter whose model is a table, and which can be drawn from."""

    name = "table"

    def __init__(self, logits: Table) -> None:
        self.logits = logits
        self._text: Text = ()
        self._tokens: dict[int, Text] = {}

    def draw(self, text: Sequence[int], drawing: Drawing, width: int) -> Drafted:
        self._text, self._tokens = tuple(text), {}
        return grow_drawn(text[-1], self._read, drawing, width)

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


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedDraws], None]:
    """Lets drafting and accepting take their chances from a script."""

    def use(draws: ScriptedDraws) -> None:
        for module in (drafting, methods):
            monkeypatch.setattr(module, "SeededDraws", lambda *_: draws)

    return use


Use = Callable[[ScriptedDraws], None]


def one_pass(method: Method, drafter: Drafter, target: Table, limits: TreeLimits) -> tuple[Text, int]:
    """The text after a pass, and how many drafted tokens were accepted."""
    text = list(PROMPT)
    guess = method.drafting.draft(drafter, text, limits)
    before = tuple(text[:-1])
    logits = np.stack([target((*before, *text_of(guess.tree, node))) for node in range(len(guess.tree))])
    accepted = method.accept(guess, logits, text)
    assert len(guess.tree) <= limits.budget
    assert len(text) == len(PROMPT) + len(accepted.path)
    assert list(accepted.path) == guess.tree.path(accepted.path[-1])
    return tuple(text[len(PROMPT) :]), len(accepted.path) - 1


def assert_lossless(
    use: Use, config: GenerationConfig, drafter: Drafter, target: Table, limits: TreeLimits, vocabulary: int
) -> None:
    """The law of the first tokens is that of plain decoding."""
    method = method_for(config, vocabulary, 0, drafter)
    assert not config.rule.kind.lossy

    def run(draws: ScriptedDraws) -> Text:
        use(draws)
        return one_pass(method, drafter, target, limits)[0]

    sampler = Sampler(config, vocabulary)

    def continued(law: dict[Text, float]) -> dict[Text, float]:
        for _ in range(LENGTH):
            longer: dict[Text, float] = {}
            for text, weight in law.items():
                if len(text) >= LENGTH:
                    longer[text[:LENGTH]] = longer.get(text[:LENGTH], 0.0) + weight
                    continue
                whole = (*PROMPT, *text)
                for token, chance in enumerate(sampler.law(target(whole), whole).tolist()):
                    if chance:
                        longer[*text, token] = longer.get((*text, token), 0.0) + weight * chance
            law = longer
        return law

    law, expected = continued(law_of(run)), continued({(): 1.0})
    for text in law.keys() | expected.keys():
        assert abs(law.get(text, 0.0) - expected.get(text, 0.0)) < 1e-12, text


def limits(budget: int, depth: int = 2) -> TreeLimits:
    return TreeLimits(budget=budget, depth=depth, branching=3)


def fixed(*rows: Sequence[float]) -> Table:
    """The same few distributions at all texts, by length."""
    return table(lambda text: rows[len(text) % len(rows)])


E = 1e-6
CASES: dict[str, tuple[Table, Table]] = {
    "equal": (fixed([0.5, 0.3, 0.2], [0.1, 0.1, 0.8]), fixed([0.5, 0.3, 0.2], [0.1, 0.1, 0.8])),
    "disjoint": (fixed([0.7, 0.3, 0, 0]), fixed([0, 0, 0.4, 0.6])),
    "disjoint in turn": (fixed([0.5, 0.5, 0], [0, 0.5, 0.5]), fixed([0.5, 0.5, 0], [1, 0, 0])),
    "target one token": (fixed([0, 1, 0]), fixed([0.3, 0.3, 0.4])),
    "drafter one token": (fixed([0.3, 0.3, 0.4]), fixed([0, 1, 0])),
    "both one, the same": (fixed([0, 1, 0]), fixed([0, 1, 0])),
    "both one, others": (fixed([0, 1, 0]), fixed([0, 0, 1])),
    "zeros": (fixed([0.6, 0, 0.4], [0, 0.5, 0.5]), fixed([0, 0.5, 0.5], [0.9, 0.1, 0])),
    "ties": (fixed([0.25, 0.25, 0.5]), fixed([0.5, 0.25, 0.25])),
    "even": (fixed([1 / 3] * 3), fixed([1 / 3] * 3, [1, 0, 0])),
    "nearly never": (fixed([E, 1 - 2 * E, E]), fixed([1 - 2 * E, E, E])),
    "opposed": (fixed([0.9, 0.09, 0.01]), fixed([0.01, 0.09, 0.9])),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", DRAWN)
def test_drawn_drafts_keep_the_targets_law(rule: str, case: str, scripted: Use) -> None:
    target, drafter = CASES[case]
    config = GenerationConfig(temperature=1, verify=rule)
    vocabulary = len(target(()))
    assert_lossless(scripted, config, TableDrafter(drafter), target, limits(4), vocabulary)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", DRAWN)
def test_three_draws_below_one_node(rule: str, case: str, scripted: Use) -> None:
    target, drafter = CASES[case]
    config = GenerationConfig(temperature=1, verify=rule)
    vocabulary = len(target(()))
    assert_lossless(scripted, config, TableDrafter(drafter), target, limits(4, depth=1), vocabulary)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("guess", [[0, 1, 2], [2, 2, 2], [1]])
@pytest.mark.parametrize("rule", PICKED)
def test_picked_drafts_keep_the_targets_law(rule: str, guess: list[int], case: str, scripted: Use) -> None:
    target, _ = CASES[case]
    config = GenerationConfig(temperature=1, verify=rule)
    drafter = PickingDrafter([guess, [0, 0, 0]])
    assert_lossless(scripted, config, drafter, target, limits(4, depth=3), len(target(())))


@pytest.mark.parametrize("rule", DRAWN)
def test_penalties_filters_and_temperature_apply_to_both_laws(rule: str, scripted: Use) -> None:
    config = GenerationConfig(
        temperature=0.7,
        top_k=3,
        top_p=0.95,
        min_p=0.02,
        repeat_penalty=1.3,
        presence_penalty=0.4,
        verify=rule,
    )
    target = fixed([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
    drafter = fixed([0.3, 0.3, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1])
    assert_lossless(scripted, config, TableDrafter(drafter), target, limits(4), 4)


@pytest.mark.parametrize("rule", DRAWN)
def test_a_drafter_with_a_smaller_vocabulary(rule: str, scripted: Use) -> None:
    config = GenerationConfig(temperature=1, presence_penalty=0.5, verify=rule)
    target, drafter = fixed([0.4, 0.3, 0.2, 0.1]), fixed([0.2, 0.3, 0.5])
    assert_lossless(scripted, config, TableDrafter(drafter), target, limits(4), 4)


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


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("budget", [3, 5])
def test_any_pair_of_laws(rule: str, budget: int) -> None:
    patch = pytest.MonkeyPatch()

    def use(draws: ScriptedDraws) -> None:
        for module in (drafting, methods):
            patch.setattr(module, "SeededDraws", lambda *_: draws)

    @given(pairs(most=3 if budget == 3 else 2), st.integers(1, 3))
    @settings(max_examples=12, deadline=None)
    def search(pair: tuple[Table, Table, int], depth: int) -> None:
        target, drafter, vocabulary = pair
        config = GenerationConfig(temperature=1, verify=rule)
        assert_lossless(use, config, TableDrafter(drafter), target, limits(budget, depth), vocabulary)

    with patch.context():
        search()
    patch.undo()
