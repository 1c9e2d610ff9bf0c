"""The greeting of a chat with a named model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.cli.conversation.welcome import greeting_line
from edgespec.costs.curves import Curve
from edgespec.costs.yields import expected_yields
from edgespec.generation.result import MemoryUse
from edgespec.planning.report.loaded import ExpectedSpeed, expected_speed
from edgespec.profiles.store import DraftProfile, PassProfile, ProfileKeys, ProfileStore

GIB = 1 << 30


def test_the_line_names_drafter_memory_and_speed() -> None:
    held = MemoryUse(resident_bytes=GIB)
    assert greeting_line("big", "small", held, ExpectedSpeed(33.2, drafted=True)) == (
        "big, drafted by small, 1.0 GiB in memory; about 33 tokens/s."
    )
    assert greeting_line("big", "small", held, ExpectedSpeed(33.2, drafted=False)) == (
        "big, drafted by small, 1.0 GiB in memory; about 33 tokens/s without drafts."
    )
    # The drafter is in memory too, and is not part of what is streamed.
    streamed = MemoryUse(resident_bytes=2 * GIB, streamed_bytes_per_pass=3 * GIB, target_bytes=4 * GIB)
    assert greeting_line("big", "none", streamed, ExpectedSpeed(1.234, drafted=False)) == (
        "big, without a drafter, 3.0 GiB of 4.0 GiB (75%) streamed per pass; about 1.2 tokens/s."
    )
    slower = ExpectedSpeed(2.0, drafted=True, alone=2.5)
    assert greeting_line("big", "small", held, slower).endswith(
        "about 2.0 tokens/s. --draft none would be about 25% faster."
    )
    assert ExpectedSpeed(2.0, drafted=True, alone=2.09).advice == ""
    assert greeting_line("big", "small", held, None) == "big, drafted by small, 1.0 GiB in memory."


def test_the_expected_speed_is_that_of_what_was_measured(tmp_path: Path) -> None:
    store, keys = ProfileStore(tmp_path), ProfileKeys.of("target", "drafter", threads=2, mode="")
    held = MemoryUse(resident_bytes=GIB)
    assert expected_speed(keys, held, 0.0, store) is None
    store.put(keys.passes, PassProfile(Curve.through([(1, 0.1), (64, 0.1)])))
    assert expected_speed(keys, held, 0.0, store) == ExpectedSpeed(10.0, drafted=False)
    store.put(keys.yields(0.0), expected_yields(0.8))
    store.put(keys.drafts, DraftProfile(Curve.through([(1, 0.001)])))
    found = expected_speed(keys, held, 0.0, store)
    assert found is not None
    assert found.drafted
    assert found.tokens_per_second > 20.0
    streamed = MemoryUse(resident_bytes=GIB, streamed_bytes_per_pass=GIB)
    assert expected_speed(keys, streamed, 0.0, store) is None, "nothing is known of the disk"


@pytest.mark.parametrize(("chance", "is_slower"), [(0.9, False), (0.01, True)])
def test_it_is_said_where_the_drafter_takes_memory_for_little(
    chance: float, is_slower: bool, tmp_path: Path
) -> None:
    """Without the drafter, three quarters of what is streamed would be in memory."""
    store, keys = ProfileStore(tmp_path), ProfileKeys.of("target", "drafter", threads=2, mode="")
    store.put(keys.passes, PassProfile(Curve.through([(1, 0.01), (64, 0.01)]), read_rate=1e9))
    store.put(keys.yields(0.0), expected_yields(chance))
    store.put(keys.drafts, DraftProfile(Curve.through([(1, 0.02)])))
    memory = MemoryUse(
        budget_bytes=3 * GIB, resident_bytes=3 * GIB, streamed_bytes_per_pass=GIB, target_bytes=13 * GIB // 4
    )
    speed = expected_speed(keys, memory, 0.0, store)
    assert speed is not None
    assert speed.alone > 0
    assert bool(speed.advice) == is_slower
    without = expected_speed(keys, replace(memory, target_bytes=4 * GIB), 0.0, store)
    assert without is not None
    assert without.advice == "", "the drafter takes no memory"
