"""Hit rates of experts: counted once, also where texts share a pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.planned_weights import HitRates, PlannedExperts, PlannedWeights
from edgespec.generation.expert_use import ExpertUse

MIB = 1 << 20


@given(st.tuples(*[st.integers(0, 10**12)] * 3), st.integers(1, 60))
def test_texts_that_share_a_pass_divide_its_experts_without_loss(
    figures: tuple[int, int, int], n: int
) -> None:
    use = ExpertUse(*figures)
    parts = use.divided(n)
    assert sum(parts, ExpertUse()) == use
    assert max(part.misses for part in parts) - min(part.misses for part in parts) <= 1
    assert use - use == ExpertUse()


def test_figures_for_scripts_are_per_token() -> None:
    assert ExpertUse(hits=30, misses=10, read_bytes=50 * MIB).to_json(tokens=5) == {
        "hit_rate": 0.75,
        "needed_per_token": 8.0,
        "read_per_token": 2.0,
        "read_bytes_per_token": 10 * MIB,
    }
    assert ExpertUse().to_json(tokens=0)["read_per_token"] == 0


@given(held=st.floats(0.05, 0.95), rate=st.floats(0.05, 0.95), other=st.floats(0.01, 1.0))
def test_hit_rates_go_through_what_was_measured_and_rise_with_memory(
    held: float, rate: float, other: float
) -> None:
    hits = HitRates.measured_at(held, rate)
    assert hits.measured
    assert abs(hits.at(held) - max(rate, held)) < 1e-9  # never worse than chance
    assert (hits.at(other) >= hits.at(held)) == (other >= held) or other == held
    assert hits.at(1.0) == 1.0
    assert 0 < HitRates().at(other) <= 1


@given(slots=st.integers(1, 1000), more=st.integers(0, 1000), rows=st.integers(1, 512), rate=st.floats(0, 1))
def test_a_pass_misses_more_with_more_rows_and_never_more_than_there_is(
    slots: int, more: int, rows: int, rate: float
) -> None:
    experts = PlannedExperts(MIB, slots, slots + more, n_needed=64, hit_rate=rate)
    assert experts.missed_bytes(rows) <= experts.missed_bytes(rows + 1) <= more * MIB
    holding = PlannedWeights(0, 0, 0, 5 * MIB + experts.missed_bytes(1), experts=experts)
    assert holding.pass_bytes(1) == holding.streamed_bytes
    assert holding.pass_bytes(rows) == 5 * MIB + experts.missed_bytes(rows)
