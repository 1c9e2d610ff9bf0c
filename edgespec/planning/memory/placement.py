"""Resident and streamed layers, under one memory budget.

Every layer is used once per pass, so the choice makes no difference to the number of bytes read. But the ring
holds few layers, and the disk is idle while it is full. So the resident layers are spread evenly between the
streamed ones.

Of a mixture of experts, what every token needs comes first, because every byte of it that is in memory saves
a byte in every pass. Single experts get what is left: a byte of them saves one only when it is needed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgespec.base.option import named
from edgespec.base.units import readable
from edgespec.errors import MemoryLimitError
from edgespec.offload.layout import PIECE_BYTES, READS_AHEAD

FEWEST_SLOTS = 2  # one in use, one being read


@dataclass(frozen=True)
class LayerPlacement:
    resident: tuple[int, ...]  # layers that stay in memory
    streamed: tuple[int, ...]  # layers that are read in every pass; empty if all fit
    n_slots: int  # layers that the ring holds
    n_bytes: int  # memory for everything, including what is not layers
    expert_slots: int = 0  # experts that the pool holds; 0 if no single experts are streamed


@dataclass(frozen=True)
class PoolSizes:
    """Memory of the pool of experts."""

    slot_bytes: int  # of one expert, with what the kernels need beside it
    fewest: int  # slots without which a pass may not find room for all that it needs of a layer
    most: int  # slots for the experts of all layers
    beside: int = 0  # bytes besides slots


def place(
    layers: Mapping[int, int],
    *,
    budget: int,
    fixed: int,
    loading: int = 0,
    n_slots: int | None = None,
) -> LayerPlacement:
    """The placement that streams the least.

    Args:
        layers: index to bytes.
        budget: bytes that may be used in total.
        fixed: bytes of everything but layers: process, caches, buffers, other weights, drafter.
        loading: bytes needed temporarily while the model is loaded, before any layer is read.
        n_slots: slots of the ring; None means the fewest that keep the disk busy. If the budget has no room
            for them, there are fewer, but at least two.

    Raises:
        MemoryLimitError: two slots do not fit; says how much is needed, also in its attribute `least`.
    """
    order = sorted(layers)
    whole = fixed + sum(layers.values())
    sizes = sorted({*layers.values()}, reverse=True) or [0]
    least = max(min(whole, *(_least(layers, size, fixed) for size in sizes)), loading)
    if budget < least:
        raise MemoryLimitError(
            f"Streaming this model needs {readable(least)} of memory, and there are {readable(budget)} "
            "in the budget.",
            f"Lower {named('context')}, or raise {named('memory')}.",
            least=least,
        )
    if whole <= budget:
        return LayerPlacement(tuple(order), (), 0, whole)
    found = [
        _with_slots_of(layers, size, budget=budget, fixed=fixed, n_slots=n_slots)
        for size in sizes
        if _least(layers, size, fixed) <= budget
    ]
    return min(found, key=lambda placement: sum(layers[index] for index in placement.streamed))


def _least(layers: Mapping[int, int], slot: int, fixed: int) -> int:
    """The least memory with slots of this size, which leave larger layers in memory."""
    return fixed + FEWEST_SLOTS * slot + sum(size for size in layers.values() if size > slot)


def _with_slots_of(
    layers: Mapping[int, int], slot: int, *, budget: int, fixed: int, n_slots: int | None
) -> LayerPlacement:
    """The placement with slots of this size, where the budget has room for two of them."""
    larger = {index for index, size in layers.items() if size > slot}
    fixed += sum(layers[index] for index in larger)
    others = {index: size for index, size in layers.items() if size <= slot}
    order = sorted(others)
    n_slots = n_slots or planned_slots(slot)
    while n_slots > FEWEST_SLOTS and fixed + n_slots * slot > budget:
        n_slots -= 1
    room, most = budget - fixed - n_slots * slot, len(order) - n_slots - 1

    def held_of(count: int) -> int:
        return sum(others[index] for index in _spread(order, count))

    count = bisect(range(most + 1), room, key=held_of) - 1
    while held_of(count) > room:  # a few more layers may be smaller together
        count -= 1
    resident = _topped_up(others, _spread(order, count), room, most)
    held = sum(others[index] for index in resident)
    stays = larger.union(resident)
    streamed = tuple(index for index in order if index not in stays)
    slot = max(layers[index] for index in streamed)  # smaller where the largest layers stay
    return LayerPlacement(tuple(sorted(stays)), streamed, n_slots, fixed + held + n_slots * slot)


def place_with_experts(
    layers: Mapping[int, int],
    pool: PoolSizes,
    *,
    budget: int,
    fixed: int,
    loading: int = 0,
    n_slots: int | None = None,
) -> LayerPlacement:
    """The placement of a mixture of experts: as many of them in memory as there is room for.

    Args:
        layers: index to bytes of what every token needs of it.
        budget, fixed, loading, n_slots: as for `place`.

    Raises:
        MemoryLimitError: as `place`.
    """
    least = pool.fewest * pool.slot_bytes + pool.beside
    rest = place(layers, budget=budget, fixed=fixed + least, loading=loading, n_slots=n_slots)
    more = min((budget - rest.n_bytes) // pool.slot_bytes, pool.most - pool.fewest)
    return replace(rest, n_bytes=rest.n_bytes + more * pool.slot_bytes, expert_slots=pool.fewest + more)


def planned_slots(slot_bytes: int) -> int:
    """The fewest slots that keep the disk busy.

    More slots would not make a pass read faster, while a resident layer saves its bytes in every pass. Two
    slots are enough for large layers (measured; see docs/experiments.md); small ones need more to have as
    many reads under way.
    """
    reads = max(-(-slot_bytes // PIECE_BYTES), 1)
    return max(1 + -(-READS_AHEAD // reads), FEWEST_SLOTS)


def _spread(order: list[int], count: int) -> tuple[int, ...]:
    """`count` of the layers, evenly spread."""
    n = len(order)
    return tuple(index for i, index in enumerate(order) if (i + 1) * count // n > i * count // n)


def _topped_up(layers: Mapping[int, int], resident: tuple[int, ...], room: int, most: int) -> tuple[int, ...]:
    """Add layers, or parts of layers, that still fit, the largest first."""
    held = sum(layers[index] for index in resident)
    chosen = set(resident)
    for index in sorted(layers, key=lambda index: (-layers[index], index)):
        if len(chosen) < most and index not in chosen and held + layers[index] <= room:
            chosen.add(index)
            held += layers[index]
    return tuple(sorted(chosen))
