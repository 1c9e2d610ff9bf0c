"""The layers that go to graphics cards: tiers of memory, the fastest first, and the disk as the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from edgespec.base.option import named
from edgespec.base.units import readable
from edgespec.config import ALL, ATTENTION, AUTO
from edgespec.costs.layer_assignment import DeviceCapacity, assign_layers, fill_devices
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import (
    CLEARLY_FASTER,
    USUAL_ROWS,
    LayerAssignment,
    hidden_bytes,
    in_words,
    layer_seconds,
    layer_sizes,
    output_bytes,
    room_here,
    transfer_seconds,
)
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.finding import PlacementRequest
from edgespec.planning.devices.splitting import AssignmentCosts, SplitSizes, fill_card
from edgespec.planning.memory.needs import MemoryNeeds

MARGIN = 0.05  # of a card's free memory, left to other programs
_FASTER = 0.95  # of the time with whole layers, that a split must not exceed
_RESERVE = 256 << 20  # bytes at least, for what a driver allocates while computing
RESERVED_SHARE = 16  # of a card's memory, no more than one part in so many is reserved


def place_on_cards(
    cards: Cards, needs: MemoryNeeds, files: ModelFiles, room: int, request: PlacementRequest
) -> LayerAssignment:
    """The devices for the layers of a model.

    What is asked for is given to the cards, the fastest first, as far as their memory reaches. With "auto", a
    layer goes wherever a pass through it takes the least time: on a card, in memory, or on the disk; unless
    passes take less time with attention first: layers on one card, some of them without their feed-forward
    weights.

    Args:
        needs: as if everything were on the processor.
        room: bytes of this machine's memory.

    Raises:
        MemoryLimitError: layers or their attention were asked for, and no card has room for those of one
            layer. Not where a load has run out of memory: what is left may be nothing.
    """
    sizes = layer_sizes(files)
    layer_bytes, here = room_here(needs, files, room)
    own_s, *there_s = layer_seconds(cards, files)
    transferred_bytes = USUAL_ROWS * hidden_bytes(files)
    places = [
        DeviceCapacity(
            card_room(card, needs.footprints[0], here), layer_s, transfer_seconds(card, transferred_bytes)
        )
        for card, layer_s in zip(cards.devices, there_s, strict=True)
    ]
    splits = _splits(cards, places, needs, files)
    costs = AssignmentCosts(cards, files, needs, here, request.read_rate)
    limited = any(card.limit is not None for card in cards.devices)
    if request.layers == ATTENTION:
        if splits:
            return min(splits, key=costs.seconds)
        if not limited:
            raise _no_room_for_attention(cards.devices, needs, files)
    if request.layers == AUTO:
        disk = DeviceCapacity(layer_bytes * len(sizes), max(own_s, layer_bytes / request.read_rate))
        counts = _fastest_counts(len(sizes), layer_bytes, DeviceCapacity(here, own_s), places, disk)
    else:
        wanted = request.wanted(len(sizes))
        counts = list(fill_devices(wanted, layer_bytes, places))
        if not any(counts) and wanted and not limited:
            raise _no_room(cards.devices, layer_bytes, places)
    whole = _whole_layers(
        cards, counts, places, files, layer_bytes, output=_takes_output(request, there_s, own_s)
    )
    if request.layers != AUTO:
        return whole
    split = min(splits, key=costs.seconds, default=whole)
    return split if costs.seconds(split) < _FASTER * costs.seconds(whole) else whole


def _fastest_counts(
    n_layers: int,
    layer_bytes: int,
    here: DeviceCapacity,
    places: Sequence[DeviceCapacity],
    disk: DeviceCapacity,
) -> list[int]:
    """The layers on each card with which a pass takes the least time."""
    slower = [replace(place, layer_s=CLEARLY_FASTER * place.layer_s) for place in places]
    assignment = assign_layers(n_layers, layer_bytes, [here, *slower, disk])
    assert assignment is not None  # the disk holds everything
    return list(assignment[1:-1])


def card_room(card: Card, target: Footprint, here: int) -> int:
    """Bytes of a card's memory for layers, with their keys and values.

    Args:
        target: what it needs; a card computes in buffers about as large as the processor's.
        here: bytes of this machine's memory for layers.
    """
    room = usable(card) if card.limit is None else min(usable(card), card.limit)
    room -= target.buffers
    return max(min(room, here) if card.shared else room, 0)


def usable(card: Card) -> int:
    """Bytes of a card's memory that may be used."""
    reserve = min(_RESERVE, card.total // RESERVED_SHARE)
    return max(card.free - max(int(card.free * MARGIN), reserve), 0)


def drafter_card(cards: Cards, files: ModelFiles, size: Footprint, wanted: str) -> Card | None:
    """The card for the drafter; None if it stays on the processor.

    A drafter runs several times for each pass of the target, so no weights are used more often.

    Args:
        cards: measured with the drafter's type.
        wanted: "auto" takes a card on which its steps are clearly faster; otherwise a card's name.

    Raises:
        MemoryLimitError: a card was named, and has no room for it.
    """
    needed = size.total
    if wanted != AUTO:
        (card,) = [card for card in cards.devices if card.name == wanted]
        if usable(card) < needed:
            raise MemoryLimitError(
                f"The drafter needs {readable(needed)}, and {card.name} has {readable(card.free)} free.",
                f"Leave out {named('draft_device')}, or use a smaller drafter.",
            )
        return card
    own_s, *there_s = layer_seconds(cards, files)
    transferred_bytes = USUAL_ROWS * hidden_bytes(files)
    n_layers = len(layer_sizes(files))
    steps = [
        (n_layers * layer_s + transfer_seconds(card, transferred_bytes), card)
        for card, layer_s in zip(cards.devices, there_s, strict=True)
        if needed <= usable(card)
    ]
    step_s, fastest = min(steps, key=lambda step: step[0], default=(math.inf, None))
    return fastest if CLEARLY_FASTER * step_s < n_layers * own_s else None


def without(cards: Cards, card: Card, n_bytes: int) -> Cards:
    """The cards, with less of one's memory free."""
    rest = [replace(c, free=max(c.free - n_bytes, 0)) if c.name == card.name else c for c in cards.devices]
    return replace(cards, devices=tuple(rest))


def _takes_output(request: PlacementRequest, there_s: Sequence[float], own_s: float) -> bool:
    return request.layers in (ALL, ATTENTION) or (
        request.layers == AUTO and min(there_s) * CLEARLY_FASTER < own_s
    )


def _whole_layers(
    cards: Cards,
    counts: Sequence[int],
    places: Sequence[DeviceCapacity],
    files: ModelFiles,
    layer_bytes: int,
    *,
    output: bool,
) -> LayerAssignment:
    """The assignment with these counts; the output is on the last card if it is wanted there and fits."""
    here = len(layer_sizes(files)) - sum(counts)
    assignment = LayerAssignment.of(files, here, counts)
    used = assignment.used(places)
    if output and here == 0 and used:
        place, count = used[-1]
        output = place.room - count * layer_bytes >= output_bytes(files)
        return _described(replace(assignment, output=output), cards)
    return _described(assignment, cards)


def _splits(
    cards: Cards, places: Sequence[DeviceCapacity], needs: MemoryNeeds, files: ModelFiles
) -> list[LayerAssignment]:
    """Layers on one card, attention first: an assignment for each card with room for that."""
    sizes = SplitSizes.of(files, needs)
    found = []
    for at, place in enumerate(places):
        split = fill_card(sizes, place.room)
        if split is not None:
            counts = [0] * len(places)
            counts[at] = len(sizes.others) - split.here
            assignment = LayerAssignment.of(files, split.here, counts, split.kept)
            found.append(_described(replace(assignment, output=split.output), cards))
    return found


def _described(assignment: LayerAssignment, cards: Cards) -> LayerAssignment:
    """The assignment with its words and key; its output is on the last card that holds layers."""
    used = [card for card, _ in assignment.used(cards.devices)]
    where = in_words(assignment.here, assignment.counts, [card.name for card in cards.devices])
    if not used:
        return replace(assignment, where=where)
    where += f" without the feed-forward weights of {assignment.kept}" if assignment.kept else ""
    where += f", the output on {used[-1].name}" if assignment.output else ""
    key = f"{where} ({', '.join(card.description for card in used)})"
    return replace(assignment, where=where, key=key)


def _no_room_for_attention(cards: Sequence[Card], needs: MemoryNeeds, files: ModelFiles) -> MemoryLimitError:
    needed = SplitSizes.of(files, needs).others[-1] + needs.footprints[0].buffers
    room = ", ".join(f"{card.name} has {readable(usable(card))}" for card in cards)
    return MemoryLimitError(
        f"Attention and the cache of one layer take {readable(needed)} with buffers, and {room} to use.",
        _less_on_cards(),
    )


def _no_room(cards: Sequence[Card], layer_bytes: int, places: Sequence[DeviceCapacity]) -> MemoryLimitError:
    free = ", ".join(f"{card.name} has {readable(card.free)} free" for card in cards)
    beside = min(usable(c) - p.room for c, p in zip(cards, places, strict=True))
    return MemoryLimitError(
        f"No layer fits on a device: one takes {readable(layer_bytes)} with its keys and values, buffers "
        f"take {readable(max(beside, 0))}, and {free}.",
        _less_on_cards(),
    )


def _less_on_cards() -> str:
    return f"Close programs that use the card, lower {named('context')}, or leave out {named('gpu_layers')}."
