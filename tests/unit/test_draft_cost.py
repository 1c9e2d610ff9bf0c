"""Costs of a target's passes for `draft make`: as they were measured, in the memory that is there now."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.drafting.agreement import Agreement, CostModel, PassCost, SampleAnswer, SampleAnswers
from edgespec.drafting.make import SavedMeasurements, _move
from tests.links import needs_links

TEXTS = (SampleAnswer((1, 2), (3, 4, 5)),)
GIB = 1 << 30


def test_the_disk_is_as_fast_as_measured_where_passes_are_bound_by_arithmetic() -> None:
    cost = CostModel.of(PassCost(pass_s=4.0, streamed_bytes=10**9, read_rate=2e9))
    assert cost.read_rate == 2e9, "not a quarter of a gigabyte a second, which is bytes over seconds"
    assert cost.read_s == pytest.approx(0.5)


def test_a_drafter_is_read_anew_at_no_cost_while_arithmetic_takes_longer() -> None:
    agreement = Agreement(0.8, 0.95, 100)

    def speed(cost: CostModel, n_bytes: int) -> float:
        return cost.tokens_per_second(agreement, 0.01, n_bytes)

    bound_by_arithmetic = CostModel.of(PassCost(4.0, 10**9, 2e9))
    assert speed(bound_by_arithmetic, 10**9) == speed(bound_by_arithmetic, 1)
    assert speed(bound_by_arithmetic, 20 * 10**9) < speed(bound_by_arithmetic, 1)
    bound_by_the_disk = CostModel.of(PassCost(0.5, 10**9, 2e9))
    assert speed(bound_by_the_disk, 10**9) < speed(bound_by_the_disk, 1)


def test_a_target_in_memory_is_not_read() -> None:
    assert CostModel.of(PassCost(0.1)).read_rate == 0
    assert CostModel.of(PassCost(0.1), 2.0).pass_s == 2.0


def test_passes_are_measured_again_with_other_memory_and_the_text_is_not_written_again(
    tmp_path: Path,
) -> None:
    asked: list[str] = []

    def write() -> SampleAnswers:
        asked.append("write")
        return SampleAnswers(TEXTS, PassCost(1.0, 100, 50.0))

    def measure() -> PassCost:
        asked.append("measure")
        return PassCost(0.25)

    first = SavedMeasurements(tmp_path / "state.json").written(4 * GIB, write, measure)
    assert first == SampleAnswers(TEXTS, PassCost(1.0, 100, 50.0))
    again = SavedMeasurements(tmp_path / "state.json").written(4 * GIB + (64 << 20), write, measure)
    assert again == first
    assert asked == ["write"]
    other = SavedMeasurements(tmp_path / "state.json").written(8 * GIB, write, measure)
    assert other == SampleAnswers(TEXTS, PassCost(0.25))
    assert asked == ["write", "measure"]
    assert SavedMeasurements(tmp_path / "state.json").written(8 * GIB, write, measure) == other
    assert asked == ["write", "measure"]


@needs_links
def test_a_link_stays_where_the_drafter_is_put(tmp_path: Path) -> None:
    (tmp_path / "made").write_bytes(b"drafter")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    _move(tmp_path / "made", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"drafter"
