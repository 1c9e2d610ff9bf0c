"""Placement: within the budget, streaming the least, and clear about what is too little."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.errors import MemoryLimitError
from edgespec.planning.memory.placement import (
    FEWEST_SLOTS,
    PoolSizes,
    place,
    place_with_experts,
    planned_slots,
)

MIB = 1 << 20


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    fixed=st.integers(0, 100),
    spare=st.integers(-50, 2000),
    n_slots=st.integers(2, 6),
)
@example(sizes=[1, 1, 5, 36, 38, 39], fixed=0, spare=119, n_slots=2)  # the largest layer stays
def test_a_placement_keeps_to_the_budget_or_is_refused(
    sizes: list[int], fixed: int, spare: int, n_slots: int
) -> None:
    layers = {2 * number: size * MIB for number, size in enumerate(sizes)}
    budget = (fixed + spare) * MIB
    try:
        placement = place(layers, budget=budget, fixed=fixed * MIB, n_slots=n_slots)
    except MemoryLimitError as error:
        least = error.least or 0
        placement = place(layers, budget=least, fixed=fixed * MIB, n_slots=n_slots)
        with pytest.raises(MemoryLimitError):
            place(layers, budget=least - 1, fixed=fixed * MIB, n_slots=n_slots)
        budget = least
    assert placement.n_bytes <= budget
    assert sorted(placement.resident + placement.streamed) == sorted(layers)
    if placement.streamed:
        assert FEWEST_SLOTS <= placement.n_slots <= n_slots
        assert len(placement.streamed) > placement.n_slots
        held = sum(layers[index] for index in placement.resident)
        slot = max(layers[index] for index in placement.streamed)
        assert placement.n_bytes == fixed * MIB + held + placement.n_slots * slot


@given(n=st.integers(4, 100), kept=st.integers(0, 90))
def test_equal_layers_fill_the_budget_and_lie_evenly(n: int, kept: int) -> None:
    kept = min(kept, n - 4)
    placement = place(dict.fromkeys(range(n), MIB), budget=(kept + 3) * MIB + 5, fixed=0, n_slots=3)
    assert len(placement.resident) == kept
    runs = [b - a for a, b in zip((-1, *placement.resident), placement.resident, strict=False)]
    assert not runs or max(runs) - min(runs) <= 1


def test_the_largest_layers_stay_where_the_others_need_smaller_slots() -> None:
    layers = {number: 12 * MIB if number % 4 == 3 else 8 * MIB for number in range(16)}
    placement = place(layers, budget=80 * MIB, fixed=0, n_slots=2)
    assert {3, 7, 11, 15} <= set(placement.resident)
    assert (len(placement.resident), placement.n_bytes) == (6, 80 * MIB)
    # Slots for the large ones would leave room for 56 MiB of layers.
    assert sum(layers[index] for index in placement.streamed) == 80 * MIB


@given(sizes=st.lists(st.sampled_from((1, 3, 8, 12)), min_size=8, max_size=60), share=st.floats(0.2, 0.95))
def test_no_more_is_streamed_than_with_slots_for_the_largest_layer(sizes: list[int], share: float) -> None:
    layers = {number: size * MIB for number, size in enumerate(sizes)}
    budget = round(share * sum(layers.values()))
    try:
        placement = place(layers, budget=budget, fixed=0, n_slots=2)
    except MemoryLimitError:
        return
    if placement.streamed:
        room = budget - 2 * max(layers.values())
        streamed = sum(layers[index] for index in placement.streamed)
        largest = max(layers[index] for index in placement.streamed)
        assert sum(layers.values()) - streamed >= room - largest


def test_everything_stays_if_it_fits() -> None:
    placement = place({0: 10, 1: 20}, budget=35, fixed=5)
    assert (placement.resident, placement.streamed, placement.n_bytes) == ((0, 1), (), 35)


def test_too_little_is_refused_with_what_would_do() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        place(dict.fromkeys(range(9), 4 * MIB), budget=100 * MIB, fixed=95 * MIB)
    assert str(caught.value) == (
        "Streaming this model needs 103.0 MiB of memory, and there are 100.0 MiB in the budget. "
        "Lower context, or raise memory."
    )
    assert caught.value.least == 103 * MIB


def test_what_loading_needs_for_a_moment_counts() -> None:
    layers = dict.fromkeys(range(9), MIB)
    with pytest.raises(MemoryLimitError) as caught:
        place(layers, budget=20 * MIB, fixed=5 * MIB, loading=30 * MIB)
    assert caught.value.least == 30 * MIB


def test_large_layers_take_two_slots_and_small_ones_as_many_reads_ahead() -> None:
    assert planned_slots(500 * MIB) == 2
    assert planned_slots(16 * MIB) == 2
    assert planned_slots(10 * MIB) == 3
    assert planned_slots(MIB) == 5
    assert place(dict.fromkeys(range(9), MIB), budget=7 * MIB, fixed=0).n_slots == 5


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    fixed=st.integers(0, 100),
    spare=st.integers(-50, 3000),
    slot=st.integers(1, 9),
    fewest=st.integers(2, 64),
    layers=st.integers(1, 40),
    beside=st.integers(0, 30),
)
def test_experts_get_what_is_left_of_the_budget(
    sizes: list[int], fixed: int, spare: int, slot: int, fewest: int, layers: int, beside: int
) -> None:
    dense = {number: size * MIB for number, size in enumerate(sizes)}
    pool = PoolSizes(slot * MIB, fewest, fewest * layers, beside * MIB)
    budget = (fixed + spare) * MIB
    try:
        placement = place_with_experts(dense, pool, budget=budget, fixed=fixed * MIB)
    except MemoryLimitError as error:
        budget = error.least or 0
        placement = place_with_experts(dense, pool, budget=budget, fixed=fixed * MIB)
    assert placement.n_bytes <= budget
    assert pool.fewest <= placement.expert_slots <= pool.most
    alone = place(dense, budget=budget, fixed=(fixed + fewest * slot + beside) * MIB)
    assert (placement.resident, placement.streamed) == (alone.resident, alone.streamed)
    assert budget - placement.n_bytes < pool.slot_bytes or placement.expert_slots == pool.most
