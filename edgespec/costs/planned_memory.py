"""How much of a model a memory budget would hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedMemory:
    """Where a target's weights would be kept.

    Attributes:
        budget: bytes that may be used in all.
        needed: bytes it would take to keep everything in memory.
        resident_bytes: the target's weights that stay in memory.
        streamed_bytes: weights read from disk in every pass; 0 if all are resident.
        slot_bytes: the size of one of the ring's `n_slots` slots.
    """

    budget: int
    needed: int
    resident_bytes: int
    streamed_bytes: int = 0
    slot_bytes: int = 0
    n_slots: int = 0
