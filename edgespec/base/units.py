"""Sizes, counts and times as people read and write them."""

from __future__ import annotations

import math
import re

from edgespec.errors import InvalidValueError

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4} | {
    f"{prefix}b": 1000**power for power, prefix in enumerate(["", "k", "m", "g", "t"])
}
_UNITS |= {f"{prefix}ib": _UNITS[prefix] for prefix in "kmgt"}

_SLOW = 0.5  # tokens a second
_LEAST_BARE = 1_000_000  # a smaller number without a unit was hardly meant as bytes


def readable(n_bytes: float) -> str:
    """Bytes: 1.5 GiB."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def rounded_up(n_bytes: int) -> int:
    """The next size that `readable` writes so that `parse_size` gives as many bytes."""
    unit = 1 << (10 * min(max(n_bytes.bit_length() - 1, 0) // 10, 4))
    tenths = -(-10 * n_bytes // unit)
    size = tenths * unit // 10
    return size if size >= n_bytes else (tenths + 1) * unit // 10


def readable_count(count: int) -> str:
    """A number of parameters: 8.03 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def readable_time(seconds: float) -> str:
    """Seconds: 40 s, 5 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def readable_duration(seconds: float) -> str:
    """Seconds of a single step: 15.2 ms, 2.31 s."""
    return f"{significant(1000 * seconds, 3)} ms" if seconds < 1 else f"{significant(seconds, 3)} s"


def readable_rate(tokens_per_second: float, unit: str = " tokens/s", *, digits: int = 3) -> str:
    """A speed: 46.7 tokens/s; a slow one as the time of a token: 24 s per token.

    Args:
        unit: of all but slow speeds.
        digits: significant ones; 2 for speeds that are only estimated.
    """
    if 0 < tokens_per_second < _SLOW:
        seconds = 1 / tokens_per_second
        return f"{readable_time(seconds) if seconds >= 600 else significant(seconds, 2) + ' s'} per token"
    return significant(tokens_per_second, digits) + unit


def significant(value: float, digits: int = 3) -> str:
    """A number for a table whose heading names the unit."""
    whole = math.floor(math.log10(value)) + 1 if value > 0 else digits
    return f"{value:.{max(digits - whole, 0)}f}"


def parse_size(text: str, name: str = "The size", *, least_bare: int = _LEAST_BARE) -> int:
    """Bytes from '12GiB', '800MB', '1.5G' (binary) or plain bytes.

    Args:
        name: of the option in messages.
        least_bare: a number without a unit that is smaller than this is refused, because "12" is a
            forgotten unit.

    Raises:
        InvalidValueError: it is not a size, not above 0, or has no unit where one is needed.
    """
    from decimal import Decimal

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise InvalidValueError(name, f"must be a size such as 12GiB, 800MB or 4000000000, not '{text}'.")
    size = int(Decimal(match[1]) * _UNITS[match[2]])
    if not 0 < size < 2**63:
        raise InvalidValueError(name, f"must be a size above 0 and below 8 EiB, not {text}.")
    if not match[2] and size < least_bare:
        raise InvalidValueError(name, f"must have a unit: {text}GiB, {text}MiB or, for bytes, {text}B.")
    return size
