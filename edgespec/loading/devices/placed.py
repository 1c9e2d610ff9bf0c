"""The places of weights, and the time of passes over them, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from edgespec.costs.curves import Curve
from edgespec.costs.planned_memory import HitRates, PlannedMemory
from edgespec.costs.planner import Passes
from edgespec.costs.spread import RemotePart, curve_over_machines
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.planning.budget import predict_memory


@dataclass(frozen=True)
class Placed:
    """The places of the weights of a target and its drafter.

    Attributes:
        holding: the target's.
        parts: of the target that devices or other machines would hold.
        drafter_parts: the drafter, if it would be on a device.
        drafter_device: the key of that device; empty for the processor.
        notes: the same in words.
    """

    holding: PlannedMemory
    parts: tuple[RemotePart, ...] = ()
    drafter_parts: tuple[RemotePart, ...] = ()
    drafter_device: str = ""
    notes: tuple[str, ...] = ()

    def passes(self, here: Curve) -> Curve:
        """Seconds of passes by rows, from those of the whole model on the processor."""
        return curve_over_machines(here, self.parts)

    def over(self, passes: Passes) -> Passes:
        """The target's passes, from those of the whole model on the processor."""
        return replace(passes, compute=self.passes(passes.compute))

    def draft_steps(self, here: Curve) -> Curve:
        """Seconds of draft steps by rows, from those on the processor."""
        return curve_over_machines(here, self.drafter_parts)


class Placement(Protocol):
    """Places a model, with drafters and caches of any size."""

    def place(
        self,
        prints: list[Footprint],
        budget: int,
        drafter: ModelFiles | None = None,
        *,
        streams: bool = False,
        hits: HitRates | None = None,
    ) -> Placed:
        """The places of the weights.

        Args:
            prints: the target's footprint, and the drafter's if it is a model.
            budget: bytes of this machine's memory.
            drafter: the drafter's files, if it is a model.
            streams, hits: as for predict_memory.

        Raises:
            MemoryLimitError: it does not fit.
        """
        ...


class OnProcessor:
    """A model on this machine's processor alone: a `Placement`."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    def place(
        self,
        prints: list[Footprint],
        budget: int,
        drafter: ModelFiles | None = None,
        *,
        streams: bool = False,
        hits: HitRates | None = None,
    ) -> Placed:
        """The places of the weights; raises as predict_memory."""
        return Placed(predict_memory(prints, self._files, budget, streams=streams, hits=hits))
