"""What of target and drafter is on this machine's devices, and what that leaves for its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.loading.cards import Card, Cards
from edgespec.loading.devices import ALL, AUTO, NONE, with_type
from edgespec.loading.placing import Wish, card_layers, drafter_card, drafter_layers, place_on_cards, without
from edgespec.loading.spreading import Spread
from edgespec.loading.state import LoadState
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.heads import is_head
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.runtime.device_layers import ON_PROCESSOR, DeviceLayers
from edgespec.offload.planning.budget import memory_room
from edgespec.offload.planning.needs import Needs
from edgespec.profiles.store import ProfileStore, disk_key
from edgespec.units import readable

_USUAL_RATE = 2e9  # bytes per second that a disk reads, until that is measured


@dataclass(frozen=True)
class OnCards:
    """What is on devices of this machine.

    Attributes:
        spread: of the target's layers; None if none are on devices.
        target: the same for llama.cpp.
        drafter_card: that the drafter is on; None if it is on the processor.
        drafter: the same for llama.cpp.
        drafter_bytes: of its weights there.
        shared_bytes: of layers on devices that use this machine's memory.
    """

    spread: Spread | None = None
    target: DeviceLayers = ON_PROCESSOR
    drafter_card: Card | None = None
    drafter: DeviceLayers = ON_PROCESSOR
    drafter_bytes: int = 0
    shared_bytes: int = 0

    @property
    def drafter_name(self) -> str:
        """The device that the drafter is on, for keys; empty if it is on the processor."""
        card = self.drafter_card
        return "" if card is None else f"{card.name} {card.description}"

    @property
    def n_layers(self) -> int:
        """Of the target."""
        return 0 if self.spread is None else self.spread.elsewhere

    def left(self, needs: Needs) -> Needs:
        """What is needed of this machine's memory.

        Args:
            needs: as if everything were on the processor.
        """
        target, *drafters = needs.footprints
        if self.spread is not None and self.n_layers:
            share = self.n_layers / (self.n_layers + self.spread.here)
            target = replace(
                target,
                weights=target.weights - self.spread.lent_bytes,
                cache=round(target.cache * (1 - share)),
            )
        if self.drafter_card is not None:  # its logits come here
            drafters = [replace(size, weights=0, cache=0) for size in drafters]
        return replace(needs, footprints=[target, *drafters], process=needs.process + self.shared_bytes)


NO_CARDS = OnCards()


def plan_for_cards(
    cards: Cards, needs: Needs, target: ModelFiles, drafter: ModelFiles | None, state: LoadState
) -> OnCards:
    """What goes to the devices: the drafter, if its steps are faster there, and then layers of the target.

    Raises:
        MemoryLimitError: something was asked for that no device has room for.
        UsageError: a device was named for a drafter that cannot be on one.
    """
    options, room = state.options, memory_room(state.options.memory)
    on = OnCards()
    if drafter is not None and not is_head(drafter.headers[0]) and options.draft_device != NONE:
        on, cards, needs = _with_drafter(on, cards, needs, drafter, state)
    if options.gpu_layers == 0:
        return on
    wish = Wish(options.gpu_layers, state.most_on_devices, read_rate(target))
    spread = place_on_cards(cards, needs, target, room, wish)
    wanted = options.gpu_layers
    total = spread.here + spread.elsewhere
    if wanted != AUTO and spread.elsewhere < (total if wanted == ALL else min(int(wanted), total)):
        state.warnings.append(f"{spread.elsewhere} of {total} layers fit on {_names(cards)}.")
    state.notes.append(f"Layers: {spread.where}.")
    if not spread.elsewhere:
        return on
    shared = _shared_bytes(cards, spread, needs.footprints[0])
    layers = card_layers(cards, spread)
    return replace(on, spread=spread, target=layers, shared_bytes=on.shared_bytes + shared)


def _with_drafter(
    on: OnCards, cards: Cards, needs: Needs, drafter: ModelFiles, state: LoadState
) -> tuple[OnCards, Cards, Needs]:
    """The drafter on a device, if that is wanted; what the devices have left, and what else is needed."""
    size = needs.footprints[1]
    options = state.options
    if options.gpu_layers == 0 and options.draft_device == AUTO:
        return on, cards, needs
    measured = with_type(cards, drafter, state.card_request)
    card = drafter_card(measured, drafter, size, options.draft_device)
    if card is None:
        return on, cards, needs
    state.notes.append(f"The drafter is on {card.name}.")
    on = replace(
        on,
        drafter_card=card,
        drafter=drafter_layers(card, drafter),
        drafter_bytes=size.weights,
        shared_bytes=size.weights + size.cache if card.shared else 0,
    )
    return on, without(cards, card, size.total), on.left(needs)


def read_rate(files: ModelFiles, store: ProfileStore | None = None) -> float:
    """Bytes that the disk of a model reads per second, as far as that is known."""
    if not files.paths[0].exists():  # planned from its header on the Hub
        return _USUAL_RATE
    disk = (store or ProfileStore()).disk(disk_key(files.paths[0]))
    return disk.speed if disk is not None and disk.speed else _USUAL_RATE


def _shared_bytes(cards: Cards, spread: Spread, target: Footprint) -> int:
    """Bytes of this machine's memory that layers on devices without memory of their own take."""
    shared = sum(n for n, card in zip(spread.counts, cards.devices, strict=True) if card.shared)
    cells = target.cache / (spread.here + spread.elsewhere)
    return round(shared * (spread.lent_bytes / spread.elsewhere + cells))


def _names(cards: Cards) -> str:
    return " and ".join(f"{card.name} ({readable(card.free)} free)" for card in cards.devices)
