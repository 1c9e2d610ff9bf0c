"""Many clients of all three APIs at once: the small version of `python -m tests.load`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load import load_test


@pytest.mark.slow
def test_no_answer_is_lost_where_half_of_the_clients_leave(short_path: Path) -> None:
    report = load_test(short_path, requests=48, clients=12, parallel=4, tokens=16)
    assert not report.problems, str(report)
    assert report.outcomes == {"left": 24, "streamed": 12, "whole": 12}
    assert report.counted["answered"] + report.counted["abandoned"] == 48 + 24, "with those without company"
