"""Measurements on a busy machine: noticed, marked, and soon corrected."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.curves import Curve
from edgespec.machine.contention import DISTURBED, ContentionWatch, ProcessorUse, pressure
from edgespec.machine.cores import usable_cores
from edgespec.measure.initial_costs import better, quicker
from edgespec.profiles.store import DraftProfile, PassProfile, ProfileKeys, ProfileStore
from edgespec.profiles.updates import corrected_passes
from tests.busy import busy_machine

CURVE = Curve.through([(1, 0.1), (8, 0.12), (32, 0.3)])
IDLE = PassProfile(CURVE, (0.01, 0.02, 0.01), quick=True)


@pytest.mark.parametrize(
    ("busy_s", "own_s", "cores", "threads", "expected"),
    [
        (20.0, 20.0, 2, 2, 0.0),  # all of it is this process
        (20.0, 13.0, 2, 2, 0.35),  # one other program on two cores
        (20.0, 0.0, 2, 2, 1.0),
        (110.0, 80.0, 64, 8, 0.0),  # others are on cores that nobody else wants
        (640.0, 80.0, 64, 8, 0.0),
        (620.0, 40.0, 64, 8, (58.0 + 8 - 64) / 8),
        (5.0, 9.0, 2, 2, 0.0),  # clocks tick at different moments
    ],
)
def test_others_count_as_far_as_they_stand_in_the_way(
    busy_s: float, own_s: float, cores: int, threads: int, expected: float
) -> None:
    before, after = ProcessorUse(5.0, 100.0, 7.0), ProcessorUse(15.0, 100.0 + busy_s, 7.0 + own_s)
    assert pressure(before, after, cores=cores, threads=threads) == pytest.approx(expected)
    assert pressure(before, before, cores=cores, threads=threads) == 0


def test_a_system_that_hides_other_programs_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    assert ContentionWatch(1).pressure == 0


def test_programs_that_take_every_core_are_noticed() -> None:
    with busy_machine():
        watch = ContentionWatch(usable_cores())
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
        assert watch.disturbed
        assert DISTURBED < watch.pressure <= 1


def test_a_disturbed_profile_is_marked_in_its_file(tmp_path: Path) -> None:
    store, keys = ProfileStore(tmp_path), ProfileKeys.of("target", "none", threads=2, mode="")
    for profile, disturbed in (
        (IDLE, False),
        (replace(IDLE, busy=0.3), True),
        (replace(IDLE, spread=(0.4, 0.3, 0.01)), True),
    ):
        store.put(keys.passes, profile)
        kept = store.passes(keys.passes)
        assert kept == profile
        assert kept.disturbed is disturbed


def test_files_from_before_busy_machines_were_noticed_can_be_read() -> None:
    record = IDLE.to_json()
    del record["busy"]
    assert PassProfile.from_json(record) == IDLE


def test_of_two_profiles_the_undisturbed_one_counts() -> None:
    slow = replace(IDLE, compute=CURVE.scaled(3), busy=0.4)
    slower = replace(IDLE, compute=CURVE.scaled(4), busy=0.2)
    assert better(slow, IDLE) is IDLE
    assert better(slow, slower) is slow, "what disturbs only ever slows down"
    assert better(slower, slow) is slow
    assert better(None, slow) is slow


def test_draft_steps_that_were_disturbed_are_marked_and_replaced(tmp_path: Path) -> None:
    store, keys = ProfileStore(tmp_path), ProfileKeys.of("target", "drafter", threads=2, mode="")
    slow = DraftProfile(CURVE.scaled(3), quick=True, busy=0.4)
    store.put(keys.drafts, slow)
    assert (stored := store.drafts(keys.drafts)) is not None
    assert stored.disturbed
    quick = DraftProfile(CURVE, quick=True)
    assert quicker(slow, quick) is quick
    assert quicker(slow, DraftProfile(CURVE.scaled(4), quick=True, busy=0.2)) is slow
    assert quicker(slow, None) is slow
    assert quicker(None, None) is None


@given(st.floats(0.1, 10), st.integers(8, 100))
def test_a_run_soon_outweighs_a_profile_that_was_disturbed(factor: float, passes: int) -> None:
    poisoned = replace(IDLE, compute=CURVE.scaled(factor), busy=0.5)
    truth = {1: [CURVE.at(1)] * passes, 24: [CURVE.at(24)] * passes}
    found = corrected_passes(poisoned, truth)
    for rows in (1, 8, 24, 32):
        before = abs(poisoned.compute.at(rows) - CURVE.at(rows))
        after = abs(found.compute.at(rows) - CURVE.at(rows))
        assert after <= before / 2 + 1e-3
    assert found.disturbed is (2 * passes < 24)


def test_passes_that_took_no_time_teach_nothing() -> None:
    assert corrected_passes(IDLE, {}) == IDLE
    assert corrected_passes(IDLE, {8: [0.0]}) == IDLE
