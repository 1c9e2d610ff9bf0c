"""The part of a model that a memory budget would hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

_UNION = 0.7  # exponent of the experts that a pass needs, over its rows: neighbours choose alike


@dataclass(frozen=True)
class PlannedExperts:
    """The single experts of a mixture that a memory budget would hold."""

    slot_bytes: int  # of one expert
    n_slots: int  # experts in memory at a time
    n_experts: int  # of all layers
    n_needed: int  # of all layers, by a pass over one row
    hit_rate: float  # the share of those that is expected to be in memory
    measured: bool = False  # whether that was measured with this model

    @property
    def held(self) -> float:
        """The share of the experts that is in memory."""
        return self.n_slots / self.n_experts

    def missed_bytes(self, rows: int) -> int:
        """Bytes that a pass over so many rows reads; it cannot miss more than is not in memory."""
        missed = self.n_needed * math.pow(rows, _UNION) * (1 - self.hit_rate)
        return round(self.slot_bytes * min(missed, self.n_experts - self.n_slots))


@dataclass(frozen=True)
class HitRates:
    """The share of needed experts that is in memory, by the share of all experts that is.

    The rate is a power of the share. An exponent of 1 is chance; routers that favour some experts for a whole
    text have a smaller one. Where it was not measured, a half is assumed: with a quarter of the experts in
    memory, that is a rate of .50, and from .38 to .73 were seen.
    """

    exponent: float = 0.5
    measured: bool = False  # whether the exponent was measured with this model

    @classmethod
    def measured_at(cls, held: float, rate: float) -> HitRates:
        """The rates of a model that had this one with this share of its experts in memory."""
        if not (0 < held < 1 and 0 < rate < 1):
            return cls()
        return cls(min(math.log(rate) / math.log(held), 1.0), measured=True)

    def at(self, held: float) -> float:
        """The rate with this share of the experts in memory."""
        return math.pow(min(max(held, 0.0), 1.0), self.exponent)


@dataclass(frozen=True)
class PlannedWeights:
    """The places of a target's weights."""

    budget: int  # bytes that may be used in all
    needed: int  # bytes it would take to keep everything in memory
    resident_bytes: int  # the target's weights that stay in memory
    streamed_bytes: int = 0  # weights read from disk in every pass over one row; 0 if all are resident
    slot_bytes: int = 0  # the size of one of the ring's `n_slots` slots
    n_slots: int = 0
    # those that are read one by one, which are part of `streamed_bytes`; None if none are
    experts: PlannedExperts | None = None

    def pass_bytes(self, rows: int) -> int:
        """Bytes of weights that a pass over so many rows reads."""
        if self.experts is None:
            return self.streamed_bytes
        return self.streamed_bytes - self.experts.missed_bytes(1) + self.experts.missed_bytes(rows)
