"""Warnings: what of a request has no effect, or another one than its client may expect."""

from __future__ import annotations

from edgespec.api.values import shown

_MAX_WARNINGS = 16


class Warnings:
    """The warnings of one request, in sentences: each once, and only so many."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}

    def add(self, sentence: str) -> None:
        """Warn, unless the same was said before."""
        if len(self._told) < _MAX_WARNINGS:
            self._told[sentence] = None

    def ignored(self, name: str, why: str = "") -> None:
        """Warn of a field that has no effect.

        Args:
            why: a reason, or what to do instead, in a sentence.
        """
        self.add(f"Ignored {shown(name)}.{f' {why}' if why else ''}")

    @property
    def sentences(self) -> tuple[str, ...]:
        """All warnings, in the order in which they came up."""
        return tuple(self._told)
