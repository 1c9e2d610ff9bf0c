"""Rules as users write them, which one is in force, and the lossy ones against their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.rules import KINDS, parse_rule
from edgespec.speculation.drafters.base import NoDrafter
from edgespec.speculation.drafters.proposing import lookup_drafter
from edgespec.speculation.draws import SeededDraws
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import method_for
from edgespec.speculation.noise import GumbelNoise, NoiseStream
from edgespec.speculation.ranking import ConfidenceFloor
from edgespec.speculation.tree import Acceptance, TokenTree
from edgespec.speculation.verification.base import DraftedTree, Verifier
from edgespec.speculation.verification.lossy import Rollback, TopKGap, Typical
from tests.unit.chance import ScriptedDraws, law_of
from tests.unit.tables import PROMPT, PickingDrafter, TableDrafter, Text, fixed, limits, one_pass

LOSSY = ["typical", "lenience", "topk-gap", "rollback"]


def test_a_rule_is_written_with_its_parameters() -> None:
    assert str(parse_rule("typical")) == "typical:epsilon=0.09,delta=0.3"
    assert str(parse_rule("typical:delta=.5")) == "typical:epsilon=0.09,delta=0.5"
    assert str(parse_rule("rollback:mismatches=2,fallback=0")) == (
        "rollback:distance=3,fallback=0,mismatches=2"
    )
    assert all(str(parse_rule(str(parse_rule(name)))) == str(parse_rule(name)) for name in KINDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recursiv", "There is no verification rule 'recursiv'. Did you mean recursive?"),
        (
            "",
            "There is no verification rule ''. Rules: auto, greedy, shared-noise, specexec, "
            "speculative, block, specinfer, spectr, recursive, typical, lenience, topk-gap, rollback.",
        ),
        ("block:k=3", "The rule 'block' has no parameter 'k'. It has none."),
        ("topk-gap:q=3", "The rule 'topk-gap' has no parameter 'q'. It has k, gap."),
        ("topk-gap:k=0", "k of the rule 'topk-gap' must be an integer from 1 to 1000, not '0'."),
        ("lenience:factor=nan", "factor of the rule 'lenience' must be a number from 0 to 1, not 'nan'."),
        ("lenience:factor", "factor of the rule 'lenience' must be a number from 0 to 1, not ''."),
    ],
)
def test_what_is_no_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        GenerationConfig(verify=text)
    assert str(refused.value) == message


def test_the_rule_in_force_follows_the_temperature() -> None:
    def in_force(name: str, temperature: float) -> str:
        return GenerationConfig(temperature=temperature, verify=name).rule.name

    assert in_force("auto", 0) == "greedy"
    assert in_force("auto", 0.5) == "shared-noise"
    for name in KINDS:
        # The papers define these two for a target that takes its likeliest token.
        stays = name in ("topk-gap", "rollback")
        assert in_force(name, 0) == (name if stays else "greedy")
        if name not in ("auto", "greedy"):
            assert in_force(name, 0.5) == name
    with pytest.raises(UsageError) as refused:
        in_force("greedy", 0.5)
    assert str(refused.value) == (
        "The rule 'greedy' takes the likeliest token, and temperature is 0.5. Leave out one of them."
    )


def test_exactly_the_lossy_rules_are_called_lossy() -> None:
    assert [name for name, kind in KINDS.items() if kind.lossy] == LOSSY
    assert not any(kind.lossy and kind.invariant for kind in KINDS.values())


@pytest.mark.parametrize("name", KINDS)
def test_every_rule_has_a_method_with_every_drafter_or_says_why_not(name: str) -> None:
    config = GenerationConfig(temperature=0 if name == "greedy" else 1, verify=name)
    for drafter in (TableDrafter(fixed([0.5, 0.5])), NoDrafter()):
        assert method_for(config, 2, 1, drafter).rule == config.rule
    if name not in ("specinfer", "spectr", "recursive"):
        assert method_for(config, 2, 1, lookup_drafter()).rule == config.rule
        return
    with pytest.raises(UsageError) as refused:
        method_for(config, 2, 1, lookup_drafter())
    assert str(refused.value) == (
        f"The rule '{name}' needs tokens sampled from a model; prompt lookup, token recycling samples none. "
        "Name a small model with draft='PATH', or use verify='specexec'."
    )
    assert method_for(config.with_(temperature=0.0), 2, 1, lookup_drafter()).rule.name == "greedy"


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.invariant])
def test_rules_say_whether_their_trees_are_chains(name: str) -> None:
    drafter = TableDrafter(fixed([0.5, 0.3, 0.2]))
    method = method_for(GenerationConfig(temperature=1, verify=name), 3, 1, drafter)
    tree = method.drafting.draft(drafter, [0, 1], limits(12, depth=6)).tree
    assert method.chain == (len(tree.leaves) == 1)


def test_only_rules_whose_text_no_size_can_change_are_sized_by_the_clock() -> None:
    drafter = TableDrafter(fixed([0.5, 0.5]))
    for name, kind in KINDS.items():
        config = GenerationConfig(temperature=0 if name == "greedy" else 1, verify=name)
        assert (method_for(config, 2, 1, drafter).nodes is None) == kind.invariant


@pytest.mark.parametrize("name", ["speculative", "block", "specinfer", "spectr", "recursive", "lenience"])
def test_a_seed_fixes_what_a_pass_draws(name: str) -> None:
    config = GenerationConfig(temperature=1, verify=name)
    target, drafter = fixed([1 / 8] * 8), TableDrafter(fixed([0.3, *[0.1] * 7]))

    def passes(seed: int) -> list[Text]:
        method = method_for(config, 8, seed, drafter)
        return [one_pass(method, drafter, target, limits(6, depth=4))[0] for _ in range(3)]

    first, again, _ = passes(5)
    assert first == again
    assert len({passes(seed)[0] for seed in range(20)}) > 10


def test_streams_of_one_seed_have_nothing_in_common() -> None:
    shared, own = (GumbelNoise(7, 200, stream).at(3) for stream in (NoiseStream.SHARED, NoiseStream.OWN))
    assert abs(np.corrcoef(shared, own)[0, 1]) < 0.3
    picks = [
        [SeededDraws(7, stream, position).pick(np.ones(1000)) for position in range(50)]
        for stream in (NoiseStream.DRAFTING, NoiseStream.ACCEPTING)
    ]
    assert sum(a == b for a, b in zip(*picks, strict=True)) < 5


def test_a_pick_never_has_a_weight_of_zero_and_follows_the_others() -> None:
    draws = SeededDraws(1, NoiseStream.ACCEPTING, 0)
    weights = np.array([0.0, 1.0, 0.0, 3.0, 0.0])
    counts = np.bincount([draws.pick(weights) for _ in range(4000)], minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert abs(counts[1] - 1000) < 130  # 4.7 standard deviations
    assert draws.pick(np.array([0.0, 5e-324, 0.0])) == 1
    assert not any(draws.coin(0.0) for _ in range(100))
    assert all(draws.coin(1.0) for _ in range(100))


# Lossy rules


def accept(verifier: Verifier, tree: TokenTree, laws: Sequence[Sequence[float]]) -> Acceptance:
    """Nodes that a deterministic rule accepts; `laws` are the target's, by node."""
    return verifier.accept(DraftedTree(tree), lambda node: np.array(laws[node]), ScriptedDraws(()))


def test_typical_acceptance_is_strict_where_the_target_is_sure() -> None:
    chain = TokenTree.chain([9, 1, 0])
    sure, open_minded = [0.95, 0.04, 0.01, 0.0], [0.25, 0.25, 0.25, 0.25]
    # Entropy 0.22: the bound is min(0.09, 0.3 x 0.80). Entropy log 4: min(0.09, 0.3 / 4).
    assert accept(Typical(0.09, 0.3), chain, [sure, sure, sure]) == Acceptance((0,), 0)
    assert accept(Typical(0.039, 0.3), chain, [sure, sure, sure]) == Acceptance((0, 1, 2), 0)
    assert accept(Typical(0.3, 0.9), chain, [open_minded] * 3) == Acceptance((0, 1, 2), 0)
    entropy = -sum(p * math.log(p) for p in sure if p)
    for delta, accepted in [(0.039, True), (0.041, False)]:
        verifier = Typical(1.0, delta * math.exp(entropy))
        assert (len(accept(verifier, chain, [sure] * 3).path) > 1) is accepted


def test_typical_acceptance_takes_the_longest_path_and_then_the_likelier_one() -> None:
    tree = TokenTree.build([9, 0, 1, 2, 0, 1], [-1, 0, 0, 2, 2, 1], [0] * 6)
    laws = [
        [0.5, 0.4, 0.1],
        [0.9, 0.05, 0.05],
        [0.4, 0.2, 0.4],
        [0.0, 1.0, 0.0],
        [0.0, 0.0, 1.0],
        [1.0, 0, 0],
    ]
    # Node 1 is likelier than 2, but its child 5 fails; of the children of 2, both pass and tie.
    assert accept(Typical(0.2, 1.0), tree, laws) == Acceptance((0, 2, 4), 2)
    laws[2] = [0.3, 0.2, 0.5]
    assert accept(Typical(0.2, 1.0), tree, laws) == Acceptance((0, 2, 3), 1)


def test_top_k_with_a_gap_wants_both() -> None:
    chain = TokenTree.chain([9, 2])
    law = [0.5, 0.3, 0.2, 0.0]
    after = [0.0, 0.0, 0.0, 1.0]
    gap = math.log(0.5 / 0.2)
    assert accept(TopKGap(3, gap + 0.01), chain, [law, after]) == Acceptance((0, 1), 3)
    assert accept(TopKGap(2, gap + 0.01), chain, [law, after]) == Acceptance((0,), 0)
    assert accept(TopKGap(3, gap - 0.01), chain, [law, after]) == Acceptance((0,), 0)
    assert accept(TopKGap(9, 100.0), TokenTree.chain([9, 3]), [law, after]) == Acceptance((0,), 0)


def test_rollback_cuts_before_the_first_token_that_is_too_far_off() -> None:
    chain = TokenTree.chain([9, 0, 1, 2])
    law = [0.7, 0.2, 0.1]
    assert accept(Rollback(3.0), chain, [law] * 4) == Acceptance((0, 1, 2, 3), 0)
    assert accept(Rollback(2.0), chain, [law] * 4) == Acceptance((0, 1, 2), 0)
    assert accept(Rollback(1.0), chain, [law] * 4) == Acceptance((0, 1), 0)
    assert accept(Rollback(100.0), chain, [[1.0, 0.0, 0.0]] * 4) == Acceptance((0, 1), 0)


def test_rollback_by_count_cuts_before_a_run_of_mismatches() -> None:
    chain = TokenTree.chain([9, 1, 0, 1, 2, 1])
    law = [0.7, 0.2, 0.1]
    assert accept(Rollback(0.0, 1), chain, [law] * 6) == Acceptance((0,), 0)
    assert accept(Rollback(0.0, 2), chain, [law] * 6) == Acceptance((0, 1, 2), 0)
    assert accept(Rollback(0.0, 3), chain, [law] * 6) == Acceptance((0, 1, 2), 0)
    assert accept(Rollback(0.0, 4), chain, [law] * 6) == Acceptance((0, 1, 2, 3, 4, 5), 0)


def test_a_rollback_draft_ends_where_the_drafter_is_unsure() -> None:
    logits = np.log(np.array([[0.6, 0.3, 0.1], [0.4, 0.3, 0.3]], dtype=np.float32))
    children = ConfidenceFloor(0.5).best(logits, [0, 0], 2)
    assert np.isfinite(children.logprobs).tolist() == [[True, True], [False, False]]


def test_lenience_accepts_more_and_bounds_how_much_likelier_a_token_gets() -> None:
    target, drafter = fixed([0.6, 0.3, 0.1]), TableDrafter(fixed([0.1, 0.2, 0.7]))

    def law(verify: str) -> dict[Text, float]:
        config = GenerationConfig(temperature=1, verify=verify)

        def run(draws: ScriptedDraws) -> Text:
            method = method_for(config, 3, 0, drafter, draws=lambda *_: draws)
            return one_pass(method, drafter, target, limits(2, depth=1))[0][:1]

        return law_of(run)

    exact, lenient = law("lenience:factor=1"), law("lenience:factor=0.5")
    assert exact == pytest.approx({(0,): 0.6, (1,): 0.3, (2,): 0.1}, abs=1e-6)
    assert lenient[(2,)] == pytest.approx(0.1 / 0.5, abs=1e-6)  # twice its probability, and never more
    assert law("lenience:factor=0") == pytest.approx({(0,): 0.1, (1,): 0.2, (2,): 0.7}, abs=1e-6)


@pytest.mark.parametrize("name", ["topk-gap", "rollback"])
def test_the_rules_for_likeliest_tokens_look_at_the_plain_law_at_temperature_0(name: str) -> None:
    drafter = PickingDrafter([[1, 1]])
    wish = {"topk-gap": "topk-gap:k=2,gap=1", "rollback": "rollback:distance=1.5"}[name]
    method = method_for(GenerationConfig(verify=wish), 3, 0, drafter)
    text, accepted = one_pass(method, drafter, fixed([0.5, 0.4, 0.1]), TreeLimits(budget=3, depth=2))
    assert (text, accepted) == ((1, 1, 0), 2)
    assert PROMPT == (1, 0)
