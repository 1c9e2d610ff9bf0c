"""Values of untrusted JSON in messages."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence

from edgespec.errors import UsageError


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
