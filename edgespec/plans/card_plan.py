"""What a plan knows of graphics cards: which layers they would hold, and what passes would take then."""

from __future__ import annotations

from edgespec.costs.curves import Curve
from edgespec.costs.planned_memory import HitRates, PlannedMemory
from edgespec.costs.spread import curve_over_machines
from edgespec.loading.card_memory import OnCards, read_rate
from edgespec.loading.cards import Cards
from edgespec.loading.devices import describe
from edgespec.loading.placing import Wish, place_on_cards
from edgespec.loading.spreading import Spread, remote_parts
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.planning.budget import predict_memory, process_bytes
from edgespec.offload.planning.needs import Needs
from edgespec.profiles.store import ProfileStore


class CardPlan:
    """A model on this machine's processor and cards.

    Args:
        layers: for the cards: a number, "auto" or "all".
    """

    def __init__(self, cards: Cards, files: ModelFiles, layers: int | str, store: ProfileStore) -> None:
        self._cards = cards
        self._files = files
        self._wish = Wish(layers, read_rate=read_rate(files, store))
        self._spread: Spread | None = None

    def holding(
        self, prints: list[Footprint], budget: int, *, streams: bool, hits: HitRates
    ) -> PlannedMemory:
        """Where weights would be.

        Args:
            prints: the target's footprint, and the drafter's if it is a model.
            budget: bytes of this machine's memory.
            streams, hits: as for predict_memory.

        Raises:
            MemoryLimitError: the budget is too small, or no card has room for a layer that was asked for.
        """
        needs = Needs(prints, process_bytes(prints), USUAL_NODES)
        spread = place_on_cards(self._cards, needs, self._files, budget, self._wish)
        self._spread = self._spread or spread  # that without a drafter comes first
        left = OnCards(spread).left(needs)
        return predict_memory(
            left.footprints,
            self._files.first_layers(spread.here) if spread.elsewhere else self._files,
            budget,
            streams=streams,
            hits=hits,
            process=left.process,
        )

    def passes(self, here: Curve) -> Curve:
        """Seconds of passes by rows, from those of the whole model on the processor."""
        assert self._spread is not None
        return curve_over_machines(here, remote_parts(self._spread, self._cards, self._files))

    @property
    def notes(self) -> list[str]:
        """What the cards are, and which layers are where."""
        assert self._spread is not None
        return [*map(describe, self._cards.devices), f"Layers: {self._spread.where}."]
