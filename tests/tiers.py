"""What `scripts/test` runs of a test with many cases, and what it leaves to `scripts/test --all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Case = TypeVar("Case")
QUICK, THOROUGH = "quick", "thorough"  # profiles of Hypothesis


def examples(thorough: int) -> int:
    """How many examples a property is tried with: a tenth of these unless the profile is the thorough one."""
    return thorough if settings.get_current_profile_name() == THOROUGH else max(thorough // 10, 5)


def slow_except(quick: Iterable[Case], cases: Iterable[Case]) -> list[Any]:
    """The cases for `parametrize`, of which all but the quick ones are marked slow.

    Args:
        cases: tuples where the test has several parameters.

    Raises:
        ValueError: a quick case is not among the cases.
    """
    quick, cases = list(quick), list(cases)
    if missing := [case for case in quick if case not in cases]:
        raise ValueError(f"{missing} are not among {cases}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]
