"""The time that an idle model stays loaded, as people and Ollama's clients write it."""

from __future__ import annotations

import re

from edgespec.errors import UsageError
from edgespec.printable import shown

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|[smh])")
_LONGEST = 64  # characters
_LONGEST_S = 4e6  # of which threads can wait on any system


def parse_keep_alive(given: object, name: str = "keep_alive") -> float:
    """The seconds of a time such as "5m" or "1h30m", or of a number of seconds; for ever if that is negative.

    Args:
        name: of the setting, for messages.

    Raises:
        UsageError: it is no time.
    """
    if isinstance(given, int | float) and not isinstance(given, bool) and given == given:  # not NaN
        return float(max(-1, min(given, _LONGEST_S)))
    text = given.strip() if isinstance(given, str) else ""
    digits = text.removeprefix("-")[:_LONGEST]
    parts = _PART.findall(digits)
    seconds = None
    if parts and "".join(number + unit for number, unit in parts) == digits:
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    elif digits.isdecimal() and len(digits) < _LONGEST:
        seconds = float(digits)
    if seconds is None:
        raise UsageError(
            f"{name} must be a time such as 30s, 5m or 1h, not {shown(given)}.", "-1 means for ever."
        )
    return -seconds if text.startswith("-") else min(seconds, _LONGEST_S)
