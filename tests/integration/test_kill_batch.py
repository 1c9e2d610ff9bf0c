"""A batch that is killed resumes without loss or doubles: the short version of tests/kill_batch.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kill_batch


@pytest.mark.slow
@pytest.mark.usefixtures("at_a_desk")
def test_a_killed_batch_leaves_what_an_undisturbed_one_does(short_path: Path, tmp_path: Path) -> None:
    assert kill_batch.check(tmp_path, kills=3, lines=6, model=str(short_path), parallel=16) >= 1
