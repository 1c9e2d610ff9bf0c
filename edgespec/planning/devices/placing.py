"""The layers that go to graphics cards: tiers of memory, the fastest first, and the disk as the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from edgespec.config import ALL, ATTENTION, AUTO
from edgespec.costs.layer_assignment import DeviceCapacity, assign_layers, fill_devices
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.option import named
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
from edgespec.planning.devices.splitting import PassCosts, SplitSizes, fill_card
from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.units import readable

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
    passes take less time with all layers on one card, some of them without their feed-forward weights.

    Args:
        needs: as if everything were on the processor.
        room: bytes of this machine's memory.

    Raises:
        MemoryLimitError: layers were asked for, and no card has room for one; or attention was asked for,
            and none has room for that of all layers.
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
    splits = [] if request.most is not None else _splits(cards, places, needs, files)
    costs = PassCosts(cards, files, needs, here, request.read_rate)
    if request.layers == ATTENTION and request.most is None:
        if not splits:
            raise _no_room_for_attention(cards.devices, needs, files)
        return min(splits, key=costs.seconds)
    if request.layers == AUTO:
        disk = DeviceCapacity(layer_bytes * len(sizes), max(own_s, layer_bytes / request.read_rate))
        counts = _fastest_counts(len(sizes), layer_bytes, DeviceCapacity(here, own_s), places, disk)
    else:
        wanted = request.wanted(len(sizes))
        counts = list(fill_devices(wanted, layer_bytes, places))
        if not any(counts) and wanted and request.most is None:
            raise _no_room(cards.devices, layer_bytes, places)
    if request.most is not None:
        _take_away(counts, sum(counts) - request.most)
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
    room = usable(card) - target.buffers
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


def _take_away(counts: list[int], excess: int) -> None:
    """Take layers from the last cards that have some."""
    for at in reversed(range(len(counts))):
        taken = min(max(excess, 0), counts[at])
        counts[at] -= taken
        excess -= taken


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
    where = in_words(here, counts, [card.name for card in cards.devices])
    used = assignment.used(list(zip(cards.devices, places, strict=True)))
    if not used:
        return replace(assignment, where=where)
    (last, place), count = used[-1]
    fits = output and here == 0 and place.room - count * layer_bytes >= output_bytes(files)
    where += f", the output on {last.name}" if fits else ""
    described = ", ".join(card.description for (card, _), _ in used)
    return replace(assignment, where=where, key=f"{where} ({described})", output=fits)


def _splits(
    cards: Cards, places: Sequence[DeviceCapacity], needs: MemoryNeeds, files: ModelFiles
) -> list[LayerAssignment]:
    """All layers on one card, some without their feed-forward weights: an assignment for each with room."""
    sizes = SplitSizes.of(files, needs)
    found = []
    for at, (card, place) in enumerate(zip(cards.devices, places, strict=True)):
        split = fill_card(sizes, place.room)
        if split is not None:
            counts = [0] * len(places)
            counts[at] = len(sizes.others)
            where = in_words(0, counts, [each.name for each in cards.devices])
            where += f" without the feed-forward weights of {split.kept}" if split.kept else ""
            where += f", the output on {card.name}" if split.output else ""
            found.append(
                replace(
                    LayerAssignment.of(files, 0, counts, split.kept),
                    where=where,
                    key=f"{where} ({card.description})",
                    output=split.output,
                )
            )
    return found


def _no_room_for_attention(cards: Sequence[Card], needs: MemoryNeeds, files: ModelFiles) -> MemoryLimitError:
    needed = sum(SplitSizes.of(files, needs).others) + needs.footprints[0].buffers
    room = ", ".join(f"{card.name} has {readable(usable(card))}" for card in cards)
    return MemoryLimitError(
        f"Attention and the cache of all layers take {readable(needed)} with buffers, and {room} to use.",
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
