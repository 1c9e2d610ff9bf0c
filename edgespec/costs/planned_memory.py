"""What a budget of memory would hold of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedMemory:
    """Where a target's weights would live.

    Attributes:
        budget: bytes that may be used in all.
        needed: bytes for everything, all weights included.
        resident_bytes: of the target's weights that stay.
        streamed_bytes: read from disk in every pass; 0 if all stay.
        slot_bytes: of a slot of the ring, of which there are `n_slots`.
    """

    budget: int
    needed: int
    resident_bytes: int
    streamed_bytes: int = 0
    slot_bytes: int = 0
    n_slots: int = 0
