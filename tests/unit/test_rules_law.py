"""Every lossless rule follows the target's law: every outcome is enumerated, through the real code.

A target and a drafter are tables from texts to logits. A method drafts a tree and accepts a path of it in
every possible way, each with its exact probability; what the text is then, and how it continues by plain
decoding, must have the law of plain decoding from the start.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import method_for
from edgespec.speculation.sampling import Sampler
from tests.tiers import examples
from tests.unit.chance import ScriptedDraws, law_of
from tests.unit.tables import (
    FILTERED,
    PROMPT,
    PickingDrafter,
    Table,
    TableDrafter,
    Text,
    fixed,
    limits,
    one_pass,
    pairs,
)

DRAWN = ["speculative", "block", "specinfer", "spectr", "recursive"]
PICKED = ["speculative", "block"]
LENGTH = 3  # tokens whose joint law is compared


def assert_lossless(
    config: GenerationConfig,
    drafter: Drafter,
    target: Table,
    limits: TreeLimits,
    vocabulary: int,
    end: int | None = None,
) -> None:
    """The law of the first tokens, up to the `end` token, is that of plain decoding."""

    def run(draws: ScriptedDraws) -> Text:
        method = method_for(config, vocabulary, 0, drafter, draws=lambda *_: draws)
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
                        more = (*text, token)
                        longer[more] = longer.get(more, 0.0) + weight * chance
            law = longer
        return law

    def ended(law: dict[Text, float]) -> dict[Text, float]:
        merged: dict[Text, float] = {}
        for text, weight in law.items():
            answer = text[: text.index(end) + 1] if end in text else text
            merged[answer] = merged.get(answer, 0.0) + weight
        return merged

    law, expected = ended(continued(law_of(run))), ended(continued({(): 1.0}))
    for text in law.keys() | expected.keys():
        assert abs(law.get(text, 0.0) - expected.get(text, 0.0)) < 1e-12, text


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
def test_drawn_drafts_keep_the_targets_law(rule: str, case: str) -> None:
    target, drafter = CASES[case]
    config = GenerationConfig(temperature=1, verify=rule)
    vocabulary = len(target(()))
    assert_lossless(config, TableDrafter(drafter), target, limits(4), vocabulary)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", DRAWN)
def test_drafts_that_stop_at_an_end_token_keep_the_law_up_to_it(rule: str, case: str) -> None:
    target, drafter = CASES[case]
    config = GenerationConfig(temperature=1, verify=rule)
    bounds = replace(limits(4, depth=3), is_end=lambda tokens: tokens == 1)
    assert_lossless(config, TableDrafter(drafter), target, bounds, len(target(())), end=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rule", "nodes"), [("specinfer", 4), ("recursive", 4), ("spectr", 10)])
def test_three_draws_below_one_node(rule: str, nodes: int, case: str) -> None:
    target, drafter = CASES[case]
    config = GenerationConfig(temperature=1, verify=rule)
    vocabulary = len(target(()))
    assert_lossless(config, TableDrafter(drafter), target, limits(nodes, depth=1), vocabulary)


@pytest.mark.parametrize("case", CASES)
def test_two_drafted_sequences(case: str) -> None:
    target, drafter = CASES[case]
    config = GenerationConfig(temperature=1, verify="spectr")
    assert_lossless(config, TableDrafter(drafter), target, limits(5), len(target(())))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("guess", [[0, 1, 2], [2, 2, 2], [1]])
@pytest.mark.parametrize("rule", PICKED)
def test_picked_drafts_keep_the_targets_law(rule: str, guess: list[int], case: str) -> None:
    target, _ = CASES[case]
    config = GenerationConfig(temperature=1, verify=rule)
    drafter = PickingDrafter([guess, [0, 0, 0]])
    assert_lossless(config, drafter, target, limits(4, depth=3), len(target(())))


@pytest.mark.parametrize("rule", DRAWN)
def test_penalties_filters_and_temperature_apply_to_both_laws(rule: str) -> None:
    config = replace(FILTERED, verify=rule)
    target = fixed([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
    drafter = fixed([0.3, 0.3, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1])
    assert_lossless(config, TableDrafter(drafter), target, limits(4), 4)


@pytest.mark.parametrize("rule", DRAWN)
def test_a_drafter_with_a_smaller_vocabulary(rule: str) -> None:
    config = GenerationConfig(temperature=1, presence_penalty=0.5, verify=rule)
    target, drafter = fixed([0.4, 0.3, 0.2, 0.1]), fixed([0.2, 0.3, 0.5])
    assert_lossless(config, TableDrafter(drafter), target, limits(4), 4)


@pytest.mark.parametrize("rule", DRAWN)
@given(pair=pairs(), depth=st.integers(1, 2), budget=st.sampled_from([2, 3, 4, 5, 10]))
@settings(max_examples=examples(100), deadline=None)
def test_any_pair_of_laws(rule: str, pair: tuple[Table, Table, int], depth: int, budget: int) -> None:
    target, drafter, vocabulary = pair
    if rule != "spectr" or depth > 1:
        budget = min(budget, 5 if vocabulary == 2 or rule == "spectr" else 4)
    config = GenerationConfig(temperature=1, verify=rule)
    assert_lossless(config, TableDrafter(drafter), target, limits(budget, depth), vocabulary)
