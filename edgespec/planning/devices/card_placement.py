"""The parts of target and drafter on this machine's devices, and what that leaves for its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgespec.base.option import named
from edgespec.base.units import readable
from edgespec.config import ATTENTION, AUTO
from edgespec.costs.layer_assignment import RemotePart
from edgespec.errors import MemoryLimitError
from edgespec.heads.families import head_of
from edgespec.llama.runtime.device_layers import ON_PROCESSOR, DeviceLayers
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import (
    LayerAssignment,
    layer_sizes,
    output_bytes,
    remote_parts,
    usual_type,
)
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.finding import PlacementRequest, with_type
from edgespec.planning.devices.placing import drafter_card, place_on_cards, usable, without
from edgespec.planning.memory.needs import MemoryNeeds

_LESS = 0.75  # of what was on a card that ran out of memory


@dataclass(frozen=True)
class CardPlacement:
    """The parts of target and drafter on devices of this machine."""

    cards: Cards | None = None  # with the memory that the drafter leaves; None if there are none
    placed: LayerAssignment | None = None  # where the target's layers are; None if none were to be on devices
    drafter_card: Card | None = None  # that the drafter is on; None if it is on the processor
    drafter_layers: int = 0  # how many layers the drafter has
    drafter_bytes: int = 0  # of its weights there
    shared_bytes: int = 0  # of layers on devices that use this machine's memory
    # bytes of the target on each card that holds layers, with its cells and buffers
    planned: tuple[tuple[Card, int], ...] = ()

    @property
    def assignment(self) -> LayerAssignment | None:
        """The places of the target's layers; None if none are on devices."""
        return self.placed if self.placed is not None and self.placed.elsewhere else None

    @property
    def target(self) -> DeviceLayers:
        """The target's layers there, for llama.cpp."""
        if self.cards is None or self.assignment is None:
            return ON_PROCESSOR
        placed = self.assignment
        pairs = [(card.pointer, count) for card, count in placed.used(self.cards.devices)]
        return DeviceLayers.of(pairs, output=placed.output, kept_names=placed.kept_names)

    @property
    def drafter(self) -> DeviceLayers:
        """All of the drafter, if it is there, for llama.cpp."""
        card = self.drafter_card
        if card is None:
            return ON_PROCESSOR
        return DeviceLayers.of([(card.pointer, self.drafter_layers)], output=True)

    @property
    def drafter_name(self) -> str:
        """The device that the drafter is on, for keys; empty if it is on the processor."""
        return "" if self.drafter_card is None else self.drafter_card.key

    @property
    def layers_there(self) -> int:
        """Number of the target's layers on devices."""
        return 0 if self.assignment is None else self.assignment.elsewhere

    @property
    def notes(self) -> list[str]:
        """The places in words."""
        notes = [] if self.drafter_card is None else [f"The drafter is on {self.drafter_card.name}."]
        return notes if self.placed is None else [*notes, f"Layers: {self.placed.where}."]

    def require_room(self) -> None:
        """Look at the cards once more before they are used.

        Some drivers end the process where memory runs out, so what other programs have taken must be noticed
        before.

        Raises:
            MemoryLimitError: a card has less memory free than when this was planned, and too little.
        """
        for card, n_bytes in self.planned:
            now = card.now()
            if now.free < card.free and usable(now) < n_bytes:
                raise MemoryLimitError(
                    f"{card.name} has {readable(now.free)} free, and had {readable(card.free)} a moment ago.",
                    f"Close programs that use the card, or leave out {named('gpu_layers')}.",
                )

    def shortfall(self, request: PlacementRequest) -> list[str]:
        """A warning if fewer layers are there than were asked for."""
        if self.cards is None or self.placed is None or request.layers == AUTO:
            return []
        total = self.placed.here + self.placed.elsewhere
        if self.placed.elsewhere >= request.wanted(total):
            return []
        free = " and ".join(f"{card.name} ({readable(card.free)} free)" for card in self.cards.devices)
        if request.layers == ATTENTION:
            return [f"Attention of {self.placed.elsewhere} of {total} layers fits on {free}."]
        return [f"{self.placed.elsewhere} of {total} layers fit on {free}."]

    def with_less(self, cards: Cards) -> Cards:
        """Cards that get less of the target than was planned here, after one has run out of memory."""
        planned = {card.name: n_bytes for card, n_bytes in self.planned}
        devices = (
            replace(card, limit=int(_LESS * planned[card.name])) if card.name in planned else card
            for card in cards.devices
        )
        return replace(cards, devices=tuple(devices))

    def left(self, needs: MemoryNeeds) -> MemoryNeeds:
        """The needs of this machine's memory.

        Args:
            needs: as if everything were on the processor.
        """
        target, *drafters = (needs if self.assignment is None else self.assignment.left(needs)).footprints
        if self.drafter_card is not None:  # its logits come here
            drafters = [replace(size, weights=0, cache=0, tables=0) for size in drafters]
        return replace(needs, footprints=[target, *drafters], process=needs.process + self.shared_bytes)


NO_CARDS = CardPlacement()


def place_models(
    cards: Cards,
    needs: MemoryNeeds,
    target: ModelFiles,
    drafter: ModelFiles | None,
    room: int,
    request: PlacementRequest,
) -> CardPlacement:
    """Give devices the drafter, if its steps are faster there, and then layers of the target.

    Args:
        needs: as if everything were on the processor.
        room: bytes of this machine's memory.

    Raises:
        MemoryLimitError: something was asked for that no device has room for.
    """
    on = CardPlacement(cards)
    if drafter is not None and request.places_drafters and head_of(drafter) is None:
        size = needs.footprints[1]
        card = drafter_card(with_type(cards, drafter, request), drafter, size, request.drafter)
        if card is not None:
            cards = without(cards, card, size.total)
            on = CardPlacement(
                cards,
                drafter_card=card,
                drafter_layers=len(layer_sizes(drafter)),
                drafter_bytes=size.weights,
                shared_bytes=size.weights + size.cache if card.shared else 0,
            )
    if request.layers == 0:
        return on
    assignment = place_on_cards(cards, on.left(needs), target, room, request)
    shared = _shared_bytes(cards, assignment, needs.footprints[0]) if assignment.elsewhere else 0
    planned = tuple(_planned_bytes(assignment, cards, target, needs.footprints[0]))
    return replace(on, placed=assignment, shared_bytes=on.shared_bytes + shared, planned=planned)


def _planned_bytes(
    assignment: LayerAssignment, cards: Cards, files: ModelFiles, target: Footprint
) -> Iterator[tuple[Card, int]]:
    """Bytes of the target on each card that holds layers, with its cells and buffers."""
    cells = target.cache // (assignment.here + assignment.elsewhere)
    parts = assignment.parts(cards.devices, files)
    for part in parts:
        output = output_bytes(files) if assignment.output and part is parts[-1] else 0
        yield part.device, part.n_bytes + part.layers * cells + target.buffers + output


def drafter_parts(on: CardPlacement, drafter: ModelFiles) -> tuple[RemotePart, ...]:
    """Seconds of draft steps on the device that the drafter is on; nothing if it is on the processor."""
    if on.drafter_card is None:
        return ()
    cards = Cards.of([on.drafter_card], usual_type(drafter))
    (layers,) = remote_parts(LayerAssignment.of(drafter, 0, [on.drafter_layers]), cards, drafter)
    return (replace(layers, share=1.0),)  # with its output


def _shared_bytes(cards: Cards, assignment: LayerAssignment, target: Footprint) -> int:
    """Bytes of this machine's memory that layers on devices without memory of their own take."""
    shared = sum(count for card, count in assignment.used(cards.devices) if card.shared)
    cells = target.cache / (assignment.here + assignment.elsewhere)
    return round(shared * (assignment.lent_bytes / assignment.elsewhere + cells))
