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
    fewest_sequences,
    knee_of_sequences,
    predict_batch,
)
from edgespec.costs.curves import Curve
from edgespec.costs.planned_weights import PlannedExperts, PlannedWeights
from edgespec.costs.planner import TargetPasses

GIB = 1 << 30
FLAT = Curve((1, 60), (0.1, 0.1))
STEEP = Curve((1, 60), (0.1, 6.0))  # every row takes as long as the first


def held(streamed: int = 0) -> PlannedWeights:
    return PlannedWeights(8 * GIB, 10 * GIB, GIB, streamed)


def test_a_pass_that_waits_for_the_disk_gives_every_text_a_token() -> None:
    passes = TargetPasses(FLAT, read_rate=GIB)
    one, many = (predict_batch(held(2 * GIB), passes, texts) for texts in (1, 16))
    assert (one.read_s, one.compute_s, one.pass_s) == (2.0, 0.1, 2.0)
    assert many.tokens_per_second == 16 * one.tokens_per_second
    assert many.tokens_per_second_a_sequence == one.tokens_per_second


def test_cells_that_displace_weights_are_paid_with_reading() -> None:
    passes = TargetPasses(FLAT, read_rate=GIB)
    assert predict_batch(held(3 * GIB), passes, 16).pass_s == 3.0


def test_prompts_of_many_texts_take_passes_of_their_own() -> None:
    """24 prompts of 90 tokens take 34 passes of 64 rows; every text then takes 64 for its answer."""
    passes = TargetPasses(FLAT, read_rate=GIB, accept_s=0.5)
    text = TextLengths(90, 64)
    found = predict_batch(held(2 * GIB), passes, 24, text, rows=64)
    assert found.prompt_s == 34 * 2.0
    assert found.tokens_per_second == pytest.approx(24 * 64 / (34 * 2.0 + 64 * 2.5))
    assert found.tokens_per_second_a_sequence == found.tokens_per_second / 24
    record = found.to_json()
    assert (record["prompt_tokens"], record["answer_tokens"], record["prompt_s"]) == (90, 64, 68.0)
    answered = predict_batch(held(2 * GIB), passes, 24)
    assert answered.tokens_per_second == pytest.approx(24 / 2.5)


def test_a_text_is_a_prompt_and_an_answer() -> None:
    assert TextLengths.of(512) == TextLengths(384, 128)
    assert TextLengths.of(100) == TextLengths(50, 50)
    assert TextLengths.of(1) == TextLengths(0, 1)


def test_more_texts_need_more_experts() -> None:
    experts = PlannedExperts(GIB // 100, n_slots=50, n_experts=200, n_needed=20, hit_rate=0.5)
    holding = replace(held(experts.missed_bytes(1)), experts=experts)
    passes = TargetPasses(FLAT, read_rate=GIB)
    one, many = (predict_batch(holding, passes, texts) for texts in (1, 16))
    assert one.read_s < many.read_s < 16 * one.read_s
    assert many.pass_s == pytest.approx(many.read_s + many.compute_s), "nothing hides the reading"
    assert many.to_json()["streamed_bytes_per_pass"] == experts.missed_bytes(16)


def test_no_more_texts_than_gain_something() -> None:
    assert knee_of_sequences(STEEP, 60) == 1
    assert knee_of_sequences(FLAT, 60) == 60
    assert knee_of_sequences(FLAT, 5) == 4
    assert knee_of_sequences(FLAT, 1) == 1
    bent = Curve((1, 16, 60), (0.1, 0.1, 0.375))  # flat up to 16, then a row takes what 16 of them share
    assert knee_of_sequences(bent, 60) == 16
    predictions = [predict_batch(held(), TargetPasses(bent), texts) for texts in SIZES]
    assert fewest_sequences(predictions).sequences == 16
    with pytest.raises(ValueError, match="nothing to choose"):
        fewest_sequences([])


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
    predictions = [predict_batch(held(streamed), TargetPasses(curve, read_rate=1e9), n) for n in SIZES]
    chosen = fewest_sequences(predictions)
    assert chosen.tokens_per_second >= 0.95 * max(p.tokens_per_second for p in predictions)
    for prediction in predictions:
        assert prediction.pass_s >= max(prediction.read_s, prediction.compute_s) * (1 - 1e-9)
        assert prediction.tokens_per_second == pytest.approx(
            prediction.sequences * prediction.tokens_per_second_a_sequence
        )
