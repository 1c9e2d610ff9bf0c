"""Progress reports of long steps."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]  # (what is being done, the fraction that is done)


def no_progress(_what: str, _fraction: float) -> None:
    """Report to nobody."""
