"""Whoever asked to be told of waiting is told, and may end it, in blocks within blocks."""

from __future__ import annotations

import pytest

from edgespec.base.progress import checked_while_waiting, report_waiting, told_of_waiting


def test_checks_come_beside_what_an_outer_block_asked_for() -> None:
    told: list[str] = []
    checks: list[str] = []
    with told_of_waiting(lambda what, _seconds: told.append(what)):
        with checked_while_waiting(lambda: checks.append("outer")):
            with checked_while_waiting(lambda: checks.append("inner")):
                report_waiting("both", 1.0)
            report_waiting("outer alone", 2.0)
        report_waiting("none", 3.0)
    report_waiting("nobody", 4.0)
    assert told == ["both", "outer alone", "none"]
    assert checks == ["outer", "inner", "outer"]


def test_a_check_ends_the_wait() -> None:
    def refuse() -> None:
        raise TimeoutError

    with checked_while_waiting(refuse), pytest.raises(TimeoutError):
        report_waiting("something", 1.0)
