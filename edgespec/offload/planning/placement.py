"""Which layers stay in memory and which are streamed, under one memory budget.

Every layer is used once a pass, so which ones stay makes no difference to the bytes that must be read.
But a ring holds few layers, and the disk stands still while it is full; so the layers that stay are
spread evenly between those that come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.errors import MemoryLimitError
from edgespec.offload.layout import PIECE_BYTES
from edgespec.units import readable

FEWEST_SLOTS = 2  # one in use, one on its way

_READS_AHEAD = 4  # what keeps a disk busy: a read under way for each reader, and one to follow it


@dataclass(frozen=True)
class Placement:
    """Where layers live.

    Attributes:
        resident: layers that stay in memory.
        streamed: layers that come and go; none if all fit.
        n_slots: layers the ring holds.
        n_bytes: memory for all of it, what is not layers included.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    n_slots: int
    n_bytes: int


def place(
    layers: Mapping[int, int],
    *,
    budget: int,
    fixed: int,
    loading: int = 0,
    n_slots: int | None = None,
) -> Placement:
    """The placement that streams the least.

    Args:
        layers: index to bytes.
        budget: bytes that may be used in all.
        fixed: bytes of everything that is not layers: process, caches, buffers, other weights, drafter.
        loading: bytes that are needed for a moment while the model is loaded, before any layer is there.
        n_slots: slots of the ring, None for the fewest that keep the disk busy; fewer, but at least two,
            if the budget has no room for so many.

    Raises:
        MemoryLimitError: two slots do not fit; says how much is needed, also in its attribute `least`.
    """
    slot = max(layers.values())
    n_slots = n_slots or planned_slots(slot)
    order = sorted(layers)
    whole = fixed + sum(layers.values())
    least = max(min(fixed + FEWEST_SLOTS * slot, whole), loading)
    if budget < least:
        raise MemoryLimitError(
            f"Streaming this model needs {readable(least)} of memory, and there are {readable(budget)} "
            "in the budget.",
            f"Ask for --memory {_megabytes(least)}MiB or more, or for a smaller --context.",
            least=least,
        )
    if whole <= budget:
        return Placement(tuple(order), (), 0, whole)
    while n_slots > FEWEST_SLOTS and fixed + n_slots * slot > budget:
        n_slots -= 1
    room = budget - fixed - n_slots * slot
    for count in range(len(order) - n_slots - 1, -1, -1):
        resident = _spread(order, count)
        held = sum(layers[index] for index in resident)
        if held <= room:
            break
    streamed = tuple(index for index in order if index not in resident)
    return Placement(resident, streamed, n_slots, fixed + held + n_slots * slot)


def planned_slots(slot_bytes: int) -> int:
    """The fewest slots that keep the disk busy.

    More would not let a pass read faster, and a layer that stays saves its bytes in every pass. Large
    layers do with two slots (measured; see docs/benchmarks.md), small ones need more for as many reads
    ahead.
    """
    reads = -(-slot_bytes // PIECE_BYTES)
    return max(1 + -(-_READS_AHEAD // reads), FEWEST_SLOTS)


def _spread(order: list[int], count: int) -> tuple[int, ...]:
    """`count` of the layers, evenly."""
    n = len(order)
    return tuple(index for i, index in enumerate(order) if (i + 1) * count // n > i * count // n)


def _megabytes(n_bytes: int) -> int:
    return -(-n_bytes // (1 << 20))
