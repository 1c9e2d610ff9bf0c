"""Counts of how often experts that a pass needed were in memory already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExpertUse:
    """Experts that passes needed, where single experts of a mixture are read from disk.

    An expert that several rows of a pass need counts once.
    """

    hits: int = 0  # were in memory
    misses: int = 0  # had to be read
    read_bytes: int = 0  # that were read for them

    @property
    def hit_rate(self) -> float:
        """The share that was in memory; 0 if none was needed."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    def __add__(self, other: ExpertUse) -> ExpertUse:
        return ExpertUse(
            self.hits + other.hits, self.misses + other.misses, self.read_bytes + other.read_bytes
        )

    def __sub__(self, other: ExpertUse) -> ExpertUse:
        return ExpertUse(
            self.hits - other.hits, self.misses - other.misses, self.read_bytes - other.read_bytes
        )

    def divided(self, n: int) -> list[ExpertUse]:
        """Divide the counts among `n` texts that shared a pass, as evenly as whole numbers can be."""
        return [ExpertUse(*((total + i) // n for total in self._figures)) for i in range(n)]

    @property
    def _figures(self) -> tuple[int, int, int]:
        return self.hits, self.misses, self.read_bytes

    def to_json(self, tokens: int) -> dict[str, Any]:
        """Convert to JSON for scripts.

        Args:
            tokens: that the passes yielded.
        """
        per_token = 1 / tokens if tokens else 0.0
        return {
            "hit_rate": round(self.hit_rate, 4),
            "needed_per_token": round((self.hits + self.misses) * per_token, 2),
            "read_per_token": round(self.misses * per_token, 2),
            "read_bytes_per_token": round(self.read_bytes * per_token),
        }
