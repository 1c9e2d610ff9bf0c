"""Progress reports of long steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, float], None]  # (what is being done, the fraction that is done)
Waiting = Callable[[str, float], None]  # (what is waited for, seconds so far)


def no_progress(_what: str, _fraction: float) -> None:
    """Report to nobody."""


_waiting: ContextVar[Waiting] = ContextVar("waiting", default=no_progress)


@contextmanager
def told_of_waiting(waiting: Waiting) -> Iterator[None]:
    """Have this thread call back several times a second while it waits for a child process in the block.

    Args:
        waiting: may raise, which ends the child and the wait.
    """
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)


@contextmanager
def checked_while_waiting(check: Callable[[], None]) -> Iterator[None]:
    """Have this thread call `check`, too, while it waits for a child process in the block.

    Args:
        check: may raise, which ends the child and the wait.
    """
    outer = _waiting.get()

    def report(what: str, seconds: float) -> None:
        outer(what, seconds)
        check()

    with told_of_waiting(report):
        yield


def report_waiting(what: str, seconds: float) -> None:
    """Tell whoever asked (`told_of_waiting`) that something is waited for."""
    _waiting.get()(what, seconds)
