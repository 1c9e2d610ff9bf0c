"""Sizes, counts and times as people read them."""

from __future__ import annotations


def readable(n_bytes: float) -> str:
    """Bytes: 1.5 GiB."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


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
