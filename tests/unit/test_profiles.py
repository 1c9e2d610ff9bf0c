"""The profile store returns what was stored under a key, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import pass_seconds
from edgespec.costs.yields import expected_yields
from edgespec.profiles.store import (
    DiskProfile,
    DraftProfile,
    ExpertProfile,
    PassProfile,
    ProfileKeys,
    ProfileStore,
)
from edgespec.profiles.updates import _StreamedPass, arriving_rate

CURVE = Curve.through([(1, 0.125), (64, 0.5)])
PASSES = PassProfile(CURVE, (0.01, 0.02), 0.001, True, 2e9, 10**9, 10**8, 1.5)
KEYS = ProfileKeys.of("target", "drafter", threads=2, mode="plain")


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "profiles")


def test_every_kind_survives_its_file(store: ProfileStore) -> None:
    drafts, disk, yields = (DraftProfile(CURVE, 1.2), DiskProfile(3e9, 1e9, 4 << 20, 2), expected_yields(0.5))
    store.put(KEYS.passes, PASSES)
    store.put(KEYS.drafts, drafts)
    store.put({"device": "1"}, disk)
    store.put(KEYS.yields(1.0), yields)
    assert store.passes(KEYS.passes) == PASSES
    assert store.drafts(KEYS.drafts) == drafts
    assert store.disk({"device": "1"}) == disk
    found = store.yields(KEYS.yields(0.8))
    assert found is not None
    assert found.at(16) == pytest.approx(yields.at(16), abs=1e-3)
    assert not list(store.folder.glob("*.partial"))


def test_what_passes_saw_of_a_disk_counts_more_than_a_measurement(store: ProfileStore) -> None:
    measured = DiskProfile(3e9, 1e9, 4 << 20, 2)
    assert measured.speed == 3e9
    store.put({"device": "1"}, replace(measured, streamed_rate=1.5e9))
    seen = store.disk({"device": "1"})
    assert seen is not None
    assert seen.speed == 1.5e9
    older = {name: n for name, n in measured.to_json().items() if name != "streamed_rate"}
    assert DiskProfile.from_json(older) == measured


@given(
    rate=st.floats(1e8, 1e10),
    overlap=st.sampled_from([1.5, 4.0, 16.0, math.inf]),
    compute=st.lists(st.floats(0.01, 3.0), min_size=4, max_size=12),
    ahead=st.floats(0.0, 0.9),
)
def test_the_rate_is_the_one_that_predicts_the_passes(
    rate: float, overlap: float, compute: list[float], ahead: float
) -> None:
    """However long the arithmetic takes, and however much was read before a pass."""
    n_bytes = 5_000_000_000
    read_s = (1 - ahead) * n_bytes / rate
    passes = [
        _StreamedPass(whole, whole - busy, ahead * n_bytes / rate)
        for busy in compute
        for whole in [pass_seconds(read_s, busy, overlap)]
    ]
    telling = [each for each in passes if each.wait_s > 0.11 * each.pass_s]
    found = arriving_rate(passes, n_bytes, overlap)
    if len(telling) >= 4:
        assert found == pytest.approx(rate, rel=1e-3)
    elif not any(each.wait_s > 0.09 * each.pass_s for each in passes):
        assert found is None


@pytest.mark.parametrize(
    "other",
    [
        ProfileKeys.of("another", "drafter", threads=2, mode="plain"),
        ProfileKeys.of("target", "drafter", threads=4, mode="plain"),
        ProfileKeys.of("target", "drafter", threads=2, mode="packed"),
    ],
)
def test_what_the_figures_depend_on_is_part_of_the_name(store: ProfileStore, other: ProfileKeys) -> None:
    store.put(KEYS.passes, PASSES)
    assert store.passes(other.passes) is None
    assert store.yields(KEYS.yields(0.0)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 99, "figures": {}}'])
def test_a_file_that_cannot_be_read_is_as_good_as_none(store: ProfileStore, text: str) -> None:
    store.put(KEYS.passes, PASSES)
    (path,) = store.folder.iterdir()
    path.write_text(text)
    assert store.passes(KEYS.passes) is None
    assert list(store.all_passes()) == []
    store.put(KEYS.passes, PASSES)
    assert store.passes(KEYS.passes) == PASSES


def test_where_nothing_can_be_written_it_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file" / "profiles")
    store.put(KEYS.passes, PASSES)
    assert store.passes(KEYS.passes) is None


def test_hit_rates_of_experts_are_kept(store: ProfileStore) -> None:
    store.put_experts("target", ExpertProfile(0.25, 0.8))
    assert store.experts("target") == ExpertProfile(0.25, 0.8)


def test_profiles_are_found_by_what_they_are_about(store: ProfileStore) -> None:
    store.put(KEYS.passes, PASSES)
    store.put(ProfileKeys.of("another", "drafter", threads=2, mode="plain").passes, PASSES)
    assert list(store.all_passes(model="target", threads="2")) == [PASSES]
