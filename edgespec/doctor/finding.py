"""A finding of the doctor about one thing that it checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, HINT, WARNING, ERROR = "ok", "hint", "warning", "error"
SEVERITIES = (OK, HINT, WARNING, ERROR)


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        severity: "ok", "hint" (could be better), "warning" (is slow or may fail) or "error" (fails).
        about: such as "memory".
        what: a sentence.
        do: what to do about it; empty with "ok".
    """

    severity: str
    about: str
    what: str
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for scripts."""
        return asdict(self)
