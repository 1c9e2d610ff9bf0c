"""Brings results into the order of the input while they are finished in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class InOrder:
    """Holds results back until all that come before them are there."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, dict[str, Any]] = {}

    @property
    def held(self) -> int:
        """Results that are held back."""
        return len(self._held)

    def add(self, place: int, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add a result; yields those that have their turn now."""
        self._held[place] = record
        while self._next in self._held:
            yield self._held.pop(self._next)
            self._next += 1
