"""Costs that size the first trees: also where passes take too long to be measured, or were disturbed.

Only a loaded model has passes that can be timed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec.base.progress import no_progress
from edgespec.costs.curves import Curve
from edgespec.engine.engine import Engine
from edgespec.kernels.report import ROWS
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.measure import initial_costs as measuring
from edgespec.measure.initial_costs import initial_costs
from edgespec.measure.passes import time_pass
from edgespec.profiles.store import DraftProfile, ProfileKeys, ProfileStore

KEYS = ProfileKeys.of("target", "drafter", threads=2, mode="")


def _pair(short_path: Path) -> Engine:
    return edgespec.load(short_path, draft=str(short_path), tree_budget=8, context=256, learn=False)


@pytest.mark.slow
def test_passes_that_take_too_long_to_be_measured_are_derived(
    short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_PATIENCE_S", 0.0)
    store = ProfileStore(tmp_path)
    with _pair(short_path) as engine:
        costs = initial_costs(engine.target, engine.drafter, 8, KEYS, no_progress, store)
    assert costs.verify.rows == ROWS, "those of which the processor's speed is known"
    assert costs.verify.at(ROWS[0]) < costs.verify.at(ROWS[-1])
    kept = store.passes(KEYS.passes)
    assert kept is not None
    assert kept.quick, "so runs correct it"


def test_draft_steps_that_were_disturbed_are_measured_again(short_path: Path, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    hours = Curve.through([(1, 3600.0), (8, 7200.0)])
    store.put(KEYS.drafts, DraftProfile(hours, quick=True, busy=0.5))
    with _pair(short_path) as engine:
        costs = initial_costs(engine.target, engine.drafter, 8, KEYS, no_progress, store)
    assert costs.step_s is not None
    assert costs.step_s < 3600
    kept = store.drafts(KEYS.drafts)
    assert kept is not None
    assert kept.step != hours


def test_a_pass_is_timed_behind_another_one(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a piece of a prompt it would take longer than among other passes."""
    decoded: list[int] = []
    with _pair(short_path) as engine:
        decode = engine.target.context.decode

        def counted(batch: TokenBatch) -> None:
            decoded.append(len(batch))
            decode(batch)

        monkeypatch.setattr(engine.target.context, "decode", counted)
        time_pass(engine.target, list(range(100, 140)), 8)
    assert decoded[-2:] == [1, 8]
