"""The cases of a test that `scripts/test` runs, and those that it leaves to `scripts/test --all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


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
