"""A plan: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgespec.costs.planner import Prediction, best
from edgespec.images.facts import ProjectorFacts


@dataclass(frozen=True)
class PlanReport:
    """A report on how a load would run on this machine."""

    model: str
    plain: Prediction  # without a drafter
    sizes: tuple[Prediction, ...]  # of trees with the drafter of a load, on prose; one node comes first
    code_sizes: tuple[Prediction, ...]  # the same on code
    drafter: str = "none"
    exact: bool | None = None  # None if that is found out while loading
    threads: int = 1
    kv: str = "f16"
    cache_bytes: int = 0  # of the target's keys and values, for a text that fills the context
    adapter_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)  # what takes it -> bytes
    notes: list[str] = field(default_factory=list)  # where the figures come from
    uncertain: bool = False  # some figures are derived, and may be off by half
    context: int = 0  # tokens
    projector: ProjectorFacts | None = None
    image_bytes: int = 0  # of the memory limit, reserved for reading images

    @property
    def chosen(self) -> Prediction:
        """The fastest way to run what is loaded, on prose."""
        return best(self.sizes)

    @property
    def ways(self) -> dict[str, Prediction]:
        """Decoding without drafts, and the fastest with them, by kind of text."""
        return {"plain": self.plain, "prose": self.chosen, "code": best(self.code_sizes)}

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "drafter": self.drafter,
            **{kind: way.to_json() for kind, way in self.ways.items()},
            "sizes": [size.to_json() for size in self.sizes],
            "exact": self.exact,
            "threads": self.threads,
            "kv": self.kv,
            "cache_bytes": self.cache_bytes,
            "adapter_bytes": self.adapter_bytes,
            "memory": self.memory,
            "projector": None if self.projector is None else self.projector.to_json(),
            "image_bytes": self.image_bytes,
            "notes": self.notes,
            "uncertain": self.uncertain,
        }
