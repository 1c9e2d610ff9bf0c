"""Which model a newcomer is shown, by memory and disk."""

from __future__ import annotations

import re

import pytest

from edgespec.cli.conversation.welcome import welcome_lines
from edgespec.costs.curves import Curve
from edgespec.models.hub import catalog
from edgespec.plans.suggestion import USABLE, Resources, suggest
from edgespec.profiles.store import PassProfile

GIB = 1 << 30


def test_more_memory_suggests_larger_models() -> None:
    chosen = [suggest(Resources(memory << 30, 500 * GIB))[0] for memory in (3, 6, 12, 24)]
    sizes = [found.entry.parameters for found in chosen]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert all(found.tokens_per_second >= 5 and not found.streams for found in chosen)


def test_a_larger_model_is_streamed_with_a_drafter() -> None:
    small, large = suggest(Resources(12 * GIB, 500 * GIB, disk_rate=14e9, threads=16))
    assert large.entry.n_bytes > 12 * GIB > small.entry.n_bytes
    assert large.streams
    assert large.drafter in large.entry.drafters
    assert large.download_bytes == large.entry.n_bytes + catalog.entries()[large.drafter].n_bytes


def test_a_small_disk_or_memory_leaves_models_out() -> None:
    for found in suggest(Resources(64 * GIB, 12 * GIB)):
        assert found.download_bytes < 12 * GIB
    assert suggest(Resources(64 * GIB, GIB)) == []
    assert suggest(Resources(GIB // 2, 500 * GIB)) == []


def test_what_is_here_is_not_downloaded_again() -> None:
    everything = frozenset(catalog.entries())
    found = suggest(Resources(12 * GIB, 100 * GIB, here=everything))
    assert found[0].download_bytes == 0
    assert welcome_lines(found)[1].endswith("(already here)")


def test_measured_passes_come_before_assumptions() -> None:
    quick = PassProfile(
        Curve.through([(1, 0.0005), (32, 0.002)]), weight_bytes=98_000_000, parameters=134_500_000
    )
    slow = PassProfile(Curve.through([(1, 0.02), (32, 0.4)]), weight_bytes=98_000_000, parameters=134_500_000)
    speeds = [suggest(Resources(12 * GIB, 500 * GIB, reference=known))[0] for known in (quick, slow)]
    assert speeds[0].entry.parameters > speeds[1].entry.parameters


def test_the_lines_have_the_commands() -> None:
    toy, *models = welcome_lines(suggest(Resources(24 * GIB, 500 * GIB)))
    assert toy == "This is SmolLM2 135M, the bundled demo model. Better ones for this machine:"
    pattern = r"  about [\d.]+ tokens/s: edgespec chat \S+( --draft \S+)? \([\d.]+ GiB\)"
    assert [bool(re.fullmatch(pattern, line)) for line in models] == [True, True]
    assert max(map(len, [toy, *models])) < 80
    assert welcome_lines([]) == [
        "This is SmolLM2 135M, the bundled demo model.",
        f"No better one in the catalog would reach {USABLE:.0f} tokens/s here.",
    ]


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize("memory", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("disk_rate", [1e8, 1.5e9, 7e9])
def test_only_usable_models_are_suggested(threads: int, memory: int, disk_rate: float) -> None:
    for found in suggest(Resources(memory << 30, 500 * GIB, disk_rate, threads=threads)):
        assert found.tokens_per_second >= USABLE


def test_a_machine_too_slow_for_all_of_them_is_told_so() -> None:
    slow = Resources(24 * GIB, 500 * GIB, products=(1e-8, 8e-8, 3e-7), threads=1)
    assert suggest(slow) == []


def test_measured_products_come_before_assumptions() -> None:
    quick = Resources(12 * GIB, 500 * GIB, products=(1e-11, 2e-11, 4e-11))
    slow = Resources(12 * GIB, 500 * GIB, products=(2e-10, 4e-10, 8e-10))
    assert suggest(quick)[0].entry.parameters > suggest(slow)[0].entry.parameters


def test_every_suggested_model_can_be_pulled_and_drafted_for() -> None:
    suggested = [entry for entry in catalog.entries().values() if entry.suggested]
    assert len(suggested) > 4
    for entry in suggested:
        assert entry.repo
        assert {*entry.drafters} <= {*catalog.entries()}


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME"])
def test_this_machine_can_be_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/nowhere/at/all")
    found = Resources.of_this_machine()
    assert found.memory > 0
    assert found.disk > 0
    assert found.here == frozenset()
