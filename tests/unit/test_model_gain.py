"""Whether a model is asked for a draft, in simulated answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.sizing.model_gain import ModelGain

_LIMITS = TreeLimits(16, min_gain=0.4, row_gain=0.05)
_STEPS, _ROWS = 3, 6  # which cost 1.5 tokens


def _asked(adds: float, promised: float, rounds: int = 400, limits: TreeLimits = _LIMITS) -> float:
    """The share of the last rounds in which a model is asked that adds so many tokens to what is promised."""
    gain, rng, asked = ModelGain(), np.random.default_rng(0), []
    for _ in range(rounds):
        by_model = gain.pays(promised, limits)
        mean = promised + adds if by_model else promised
        gain.add(promised, 1 + int(rng.poisson(mean - 1)), (_STEPS, _ROWS) if by_model else None)
        asked.append(by_model)
    return float(np.mean(asked[rounds // 2 :]))


@pytest.mark.parametrize("promised", [1.1, 3.0, 12.0])
def test_a_model_is_asked_where_it_adds_more_than_it_costs(promised: float) -> None:
    assert _asked(4.0, promised) > 0.9
    assert _asked(0.0, promised) < 0.2


def test_a_model_is_always_asked_while_the_disk_is_waited_for() -> None:
    assert _asked(0.5, 3.0, limits=replace(_LIMITS, overlap_budget=10.0)) == 1


def test_a_step_costs_fewer_accepted_tokens_than_promised_ones_where_trees_promise_too_much() -> None:
    assert _asked(1.1, 3.0) < 0.4
    assert _asked(1.1, 3.0, limits=replace(_LIMITS, trust=0.5)) > 0.9


def test_what_is_learned_of_quotes_says_nothing_about_other_passages() -> None:
    gain = ModelGain()
    for _ in range(50):
        gain.add(12.0, 12, None)
        gain.add(12.0, 12, (_STEPS, _ROWS))
    assert not gain.pays(12.0, _LIMITS)
    assert gain.pays(1.1, _LIMITS)
