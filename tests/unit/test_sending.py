"""Weights in memory beside a card: when they are sent to it. A machine is given by its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from edgespec.costs.curves import Curve
from edgespec.costs.sending import NEVER, HostCosts, choose_products, least_rows_sent, plain_products

# A processor that takes 1 s for a GB and a row; of rearranged weights, further rows take a quarter of that.
PLAIN = Curve.through([(1, 1e-9), (8, 8e-9), (32, 32e-9)])
REARRANGED = Curve.through([(1, 1e-9), (8, 2.75e-9), (32, 8.75e-9)])
CARD = Curve.through([(1, 0.1e-9), (8, 0.1e-9), (32, 0.1e-9)])
COSTS = HostCosts(PLAIN, REARRANGED, CARD, link_s=4e-9)

# Seconds of passes of a 27B on a card in docs/device-benchmarks.md, with 5.2 GiB of its weights in memory.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MEASURED_PLAIN = (0.082, 0.101, 0.161, 0.327, 0.322, 0.434, 0.693, 1.213)
MEASURED_REARRANGED = (0.065, 0.072, 0.075, 0.101, 0.113, 0.217, 0.346, 0.581)
MEASURED_SENT = (0.102, 0.103, 0.107, 0.115, 0.111, 0.118, 0.127, 0.149)


def with_rows(rows: int) -> Callable[[Curve], float]:
    """The speed where all passes have so many rows."""
    return lambda seconds: 1 / seconds.at(rows)


@pytest.mark.parametrize(
    ("link_s", "least"),
    [
        (4e-9, 5),  # 4.1 s a GB: the processor takes 4 s for 4 rows and 5 s for 5
        (0.5e-9, 1),  # 0.6 s, where a single row takes 1 s
        (99.95e-9, 101),  # 100.05 s
        (1e-6, NEVER),  # 1000 s: more than the processor takes for the largest passes
    ],
)
def test_weights_are_sent_from_the_rows_on_for_which_the_link_is_faster(link_s: float, least: int) -> None:
    costs = replace(COSTS, link_s=link_s)
    assert least_rows_sent(costs, costs.plain) == least
    assert plain_products(costs).sent_from == least


def test_the_time_of_products_is_that_of_the_faster_side() -> None:
    seconds = plain_products(COSTS).seconds
    assert [seconds.at(rows) for rows in (1, 4, 5, 32, 512)] == pytest.approx(
        [1e-9, 4e-9, 4.1e-9, 4.1e-9, 4.1e-9]
    )


def test_a_card_whose_own_time_grows_is_sent_weights_only_where_it_stays_ahead() -> None:
    """It is faster for 5 to 30 rows and slower for more: then nothing is sent."""
    slow = Curve.through([(1, 0.1e-9), (8, 0.1e-9), (32, 32e-9)])
    assert least_rows_sent(replace(COSTS, card=slow), PLAIN) == NEVER


@pytest.mark.parametrize(
    ("rows", "rearranged"),
    [
        (1, True),  # 1 s against 1 s
        (8, True),  # 2.75 s against 4.1 s
        (15, True),  # 4.5 s against 4.1 s, which is not clearly less
        (16, False),  # 4.75 s against 4.1 s
        (32, False),  # 8.75 s against 4.1 s
    ],
)
def test_weights_are_rearranged_for_small_trees_and_sent_for_large_ones(rows: int, rearranged: bool) -> None:
    found = choose_products(COSTS, with_rows(rows))
    assert found.rearranged == rearranged
    assert found.sent_from == (NEVER if found.rearranged else 5)


@pytest.mark.parametrize(
    ("read_s", "least"),
    [
        (16e-9, 65),  # 16 s for a GB, and 65 rows take 17 s
        (27.1e-9, 106),  # 27.1 s, and 105 rows take 27
        (1e-9, 65),  # 8.1 s, as the link is crossed twice: 30 rows would be enough, but trees have as many
        (1e-6, NEVER),  # 1000 s
        (None, NEVER),
    ],
)
def test_rearranged_weights_are_read_again_for_long_passes(read_s: float | None, least: int) -> None:
    found = choose_products(replace(COSTS, read_s=read_s), with_rows(8))
    assert (found.rearranged, found.sent_from) == (True, least)
    assert found.rereads == found.sends == (least != NEVER)
    assert found.seconds.at(8) == REARRANGED.at(8)
    if least != NEVER:
        assert found.seconds.at(512) == pytest.approx(max(read_s or 0.0, REARRANGED.at(least - 1)))


def test_without_kernels_for_rearranged_weights_they_are_sent_where_that_is_faster() -> None:
    found = choose_products(replace(COSTS, rearranged=None), with_rows(1))
    assert (found.rearranged, found.sent_from) == (False, 5)


@pytest.mark.parametrize(("rows", "sent"), [(1, False), (8, False), (16, False), (32, True), (64, True)])
def test_the_measured_card_is_sent_weights_where_its_table_says_so(rows: int, sent: bool) -> None:
    """All of a pass counts as the time of what is in memory, so the card's own time is in the link's."""
    plain, rearranged = (
        Curve.through(zip(ROWS, seconds, strict=True)) for seconds in (MEASURED_PLAIN, MEASURED_REARRANGED)
    )
    all_of_it = [s - MEASURED_SENT[0] + 1e-4 for s in MEASURED_SENT]
    card = Curve.through(zip(ROWS, all_of_it, strict=True))
    costs = HostCosts(plain, rearranged, card, link_s=MEASURED_SENT[0] - 1e-4)
    # 0.103 s against 0.101 for 2 rows, and 0.105 against 0.131 for 3.
    assert least_rows_sent(costs, costs.plain) == 3
    assert choose_products(costs, with_rows(rows)).rearranged is not sent
