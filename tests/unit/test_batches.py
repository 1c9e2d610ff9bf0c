"""The arithmetic of many texts at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.batches import (
    SIZES,
    SequenceCells,
    TextLengths,
    batch_speed,
    fewest_sequences,
    knee_of_sequences,
)
from edgespec.costs.curves import Curve
from edgespec.costs.planned_weights import PlannedExperts, PlannedWeights
from edgespec.costs.planner import TargetPasses

GIB = 1 << 30
FLAT = Curve((1, 60), (0.1, 0.1))
STEEP = Curve((1, 60), (0.1, 6.0))  # every row takes as long as the first


def held(streamed: int = 0) -> PlannedWeights:
    return PlannedWeights(8 * GIB, 10 * GIB, GIB, streamed)


def speed(streamed: int, passes: TargetPasses, texts: int) -> float:
    """Tokens per second of texts whose prompts were read."""
    return batch_speed(held(streamed), passes, texts, TextLengths(0, 1), rows=1)


def test_a_pass_that_waits_for_the_disk_gives_every_text_a_token() -> None:
    passes = TargetPasses(FLAT, read_rate=GIB)
    assert speed(2 * GIB, passes, 1) == 1 / 2.0
    assert speed(2 * GIB, passes, 16) == 16 / 2.0


def test_cells_that_displace_weights_are_paid_with_reading() -> None:
    assert speed(3 * GIB, TargetPasses(FLAT, read_rate=GIB), 16) == pytest.approx(16 / 3.0)


def test_prompts_of_many_texts_take_passes_of_their_own() -> None:
    """24 prompts of 90 tokens take 34 passes of 64 rows; every text then takes 64 for its answer."""
    passes = TargetPasses(FLAT, read_rate=GIB, accept_s=0.5)
    found = batch_speed(held(2 * GIB), passes, 24, TextLengths(90, 64), rows=64)
    assert found == pytest.approx(24 * 64 / (34 * 2.0 + 64 * 2.5))
    assert speed(2 * GIB, passes, 24) == pytest.approx(24 / 2.5)


def test_a_text_is_a_prompt_and_an_answer() -> None:
    assert TextLengths.of(512) == TextLengths(384, 128)
    assert TextLengths.of(100) == TextLengths(50, 50)
    assert TextLengths.of(1) == TextLengths(0, 1)


def test_more_texts_need_more_experts() -> None:
    experts = PlannedExperts(GIB // 100, n_slots=50, n_experts=200, n_needed=20, hit_rate=0.5)
    holding = replace(held(experts.missed_bytes(1)), experts=experts)
    passes = TargetPasses(FLAT, read_rate=GIB)
    one, many = (texts / batch_speed(holding, passes, texts, TextLengths(0, 1), rows=1) for texts in (1, 16))
    assert one < many < 16 * one
    read_s = experts.missed_bytes(16) + held().streamed_bytes
    assert many == pytest.approx(read_s / GIB + 0.1), "nothing hides the reading"


def test_no_more_texts_than_gain_something() -> None:
    assert knee_of_sequences(STEEP, 60) == 1
    assert knee_of_sequences(FLAT, 60) == 60
    assert knee_of_sequences(FLAT, 5) == 4
    assert knee_of_sequences(FLAT, 1) == 1
    bent = Curve((1, 16, 60), (0.1, 0.1, 0.375))  # flat up to 16, then a row takes what 16 of them share
    assert knee_of_sequences(bent, 60) == 16
    assert fewest_sequences({texts: speed(0, TargetPasses(bent), texts) for texts in SIZES}) == 16


def test_texts_and_the_bytes_they_take() -> None:
    cells = SequenceCells(cell_bytes=1000, tokens=500)
    assert cells.sequence_bytes == 500_000


curves = st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=6).map(
    lambda times: Curve.through(zip((1, 4, 9, 20, 40, 60), times, strict=False))
)


@given(curves, st.integers(1, 80), st.integers(0, 4 * GIB))
def test_the_choice_is_nearly_the_fastest_and_none_smaller_is(curve: Curve, most: int, streamed: int) -> None:
    texts = knee_of_sequences(curve, most)
    speeds = {n: n / curve.at(n) for n in SIZES if n <= most}
    assert speeds[texts] >= 0.95 * max(speeds.values())
    assert all(speeds[n] < 0.95 * max(speeds.values()) for n in speeds if n < texts)
    found = {n: speed(streamed, TargetPasses(curve, read_rate=1e9), n) for n in SIZES}
    assert found[fewest_sequences(found)] >= 0.95 * max(found.values())
