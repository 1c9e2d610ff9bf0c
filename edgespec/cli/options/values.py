"""Values of options that are more than a word or a number: sizes and tree budgets."""

from __future__ import annotations

import re
from decimal import Decimal

from edgespec.errors import UsageError

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4} | {
    f"{prefix}b": 1000**power for power, prefix in enumerate(["", "k", "m", "g", "t"])
}
_UNITS |= {f"{prefix}ib": _UNITS[prefix] for prefix in "kmgt"}


_LEAST_BARE = 1_000_000  # a smaller number without a unit was hardly meant as bytes


def parse_size(text: str, *, least_bare: int = _LEAST_BARE) -> int:
    """Bytes from '12GiB', '800MB', '1.5G' (binary) or plain bytes.

    Args:
        least_bare: a number without a unit that is smaller than this is refused, because "12" is a
            forgotten unit.

    Raises:
        UsageError: it is not a size, not above 0, or has no unit where one is needed.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"'{text}' is not a size.", "Write it like 12GiB, 800MB or 4000000000.")
    size = int(Decimal(match[1]) * _UNITS[match[2]])
    if not 0 < size < 2**63:
        raise UsageError(f"A size of {text} makes no sense.", "It must be above 0 and below 8 EiB.")
    if not match[2] and size < least_bare:
        raise UsageError(f"The size {text} has no unit.", f"Write {text}GiB or {text}MiB; {text}B is bytes.")
    return size


def parse_tree_budget(text: str) -> int | None:
    """A number of nodes; None for auto.

    Raises:
        UsageError: it is neither.
    """
    if text.strip().lower() == "auto":
        return None
    if not re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII):
        raise UsageError(f"The tree budget is '{text}'.", "It must be a number of nodes, or auto.")
    return int(text)


def parse_gpu_layers(text: str) -> int | str:
    """A number of layers, "auto" or "all", for which other programs write -1.

    Raises:
        UsageError: it is none of these.
    """
    word = text.strip().lower()
    if word in ("auto", "all"):
        return word
    if word == "-1":
        return "all"
    if not re.fullmatch(r"\d{1,6}", word, re.ASCII):
        raise UsageError(f"The gpu layers are '{text}'.", "They must be a number, auto or all.")
    return int(word)
