"""Where weights would be on this machine's processor and cards, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from edgespec.costs.planned_memory import HitRates
from edgespec.loading.devices.cards import Cards
from edgespec.loading.devices.finding import PlacementRequest
from edgespec.loading.devices.on_cards import drafter_parts, place_models
from edgespec.loading.devices.placed import OnProcessor, Placed, Placement
from edgespec.loading.devices.spreading import read_rate, remote_parts
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.planning.budget import predict_memory, process_bytes
from edgespec.offload.planning.needs import Needs
from edgespec.profiles.store import ProfileStore


class CardPlan:
    """A model on this machine's processor and cards: a `Placement`.

    Args:
        request: by which the cards were found.
    """

    def __init__(
        self, cards: Cards, files: ModelFiles, request: PlacementRequest, store: ProfileStore | None = None
    ) -> None:
        self._cards = cards
        self._files = files
        self._request = replace(request, read_rate=read_rate(files, store))

    def place(
        self,
        prints: list[Footprint],
        budget: int,
        drafter: ModelFiles | None = None,
        *,
        streams: bool = False,
        hits: HitRates | None = None,
    ) -> Placed:
        """Where weights would be.

        Raises:
            MemoryLimitError: the budget is too small, or no card has room for what was asked for.
        """
        needs = Needs(prints, process_bytes(prints), USUAL_NODES)
        on = place_models(self._cards, needs, self._files, drafter, budget, self._request)
        left = on.left(needs)
        spread = on.spread
        holding = predict_memory(
            left.footprints,
            self._files if spread is None else self._files.first_layers(spread.here),
            budget,
            streams=streams,
            hits=hits,
            process=left.process,
        )
        parts = () if spread is None else remote_parts(spread, self._cards, self._files)
        drafts = () if drafter is None else drafter_parts(on, drafter)
        return Placed(holding, tuple(parts), drafts, on.drafter_name, tuple(on.notes))


def placement_here(
    cards: Cards | None, files: ModelFiles, request: PlacementRequest, store: ProfileStore | None = None
) -> Placement:
    """A model on this machine: on its cards, if there are any, and its processor.

    Args:
        request: by which the cards were found.
    """
    return OnProcessor(files) if cards is None else CardPlan(cards, files, request, store)
