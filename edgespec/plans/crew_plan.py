"""What a plan knows of workers: which layers they would hold, and what passes through them would take."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.costs.curves import Curve
from edgespec.costs.planned_memory import PlannedMemory
from edgespec.costs.spread import curve_over_machines
from edgespec.loading.spreading import Spread, layer_seconds, remote_parts, usual_type
from edgespec.loading.workers import spread_over
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.planning.budget import bytes_needed, process_bytes
from edgespec.offload.planning.needs import Needs
from edgespec.units import readable
from edgespec.workers.address import parse_addresses
from edgespec.workers.crew import Crew


class CrewPlan:
    """A model on this machine and workers, which were measured and are free again."""

    def __init__(self, crew: Crew, files: ModelFiles) -> None:
        self._crew = crew
        self._files = files
        self._spread: Spread | None = None

    @classmethod
    def of(cls, workers: Sequence[str], files: ModelFiles, threads: int) -> CrewPlan:
        """Measure the workers.

        Raises:
            BackendError, WorkerError: as Crew.
        """
        crew = Crew(parse_addresses(",".join(workers)), type_id=usual_type(files), n_threads=threads)
        crew.close()
        return cls(crew, files)

    def holding(self, prints: list[Footprint], budget: int) -> PlannedMemory:
        """Where weights would be.

        Args:
            prints: the target's footprint, and the drafter's if it is a model.
            budget: bytes of this machine.

        Raises:
            MemoryLimitError: all memories together do not hold the model.
        """
        process = process_bytes(prints)
        spread = spread_over(
            self._crew.devices,
            Needs(prints, process, USUAL_NODES),
            self._files,
            budget,
            layer_seconds(self._crew, self._files),
        )
        self._spread = self._spread or spread  # that without a drafter comes first
        lent = sum(device.free for device in self._crew.devices)
        return PlannedMemory(budget + lent, bytes_needed(prints, process), self._files.tensor_bytes)

    def passes(self, here: Curve) -> Curve:
        """Seconds of passes by rows, from those of the whole model on this machine."""
        assert self._spread is not None
        return curve_over_machines(here, remote_parts(self._spread, self._crew, self._files))

    @property
    def notes(self) -> list[str]:
        """Which layers are where, and how far away."""
        assert self._spread is not None
        devices = self._crew.devices
        here, *there = layer_seconds(self._crew, self._files)
        return [f"Layers: {self._spread.where}."] + [
            f"{d.name} lends {readable(d.free)} and is {d.ping_s * 1e3:.1f} ms away; products take "
            f"{seconds / here:.1f} times as long there as here."
            for d, seconds in zip(devices, there, strict=True)
        ]
