"""Values of fields in untrusted JSON: checked for kind and range, and shown in messages in short."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import UsageError


def integer(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """A whole number within a range, which may be written as 8.0; None if it is left out.

    Raises:
        UsageError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise wrong(name, value, f"an integer from {least} to {most}")
    return value


def boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false.

    Raises:
        UsageError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


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
