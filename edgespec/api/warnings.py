"""Errors and warnings about fields of requests, and their values in short."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence

from edgespec.errors import UsageError

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


def wrong(name: str, value: object, wanted: str) -> UsageError:
    """The error for a field with another value than the wanted kind."""
    return UsageError(f"{name} must be {wanted}, not {shown(value)}.")


def shown(value: object) -> str:
    """A value for a message, as JSON has it, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and abs(value) > 10**40:
        return "a very large number"
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
        return "a list" if isinstance(value, Sequence) else "an object"
    return reprlib.repr(value)
