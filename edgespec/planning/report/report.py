"""A plan: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgespec.costs.planner import Prediction, best
from edgespec.images.facts import ProjectorFacts
from edgespec.planning.report.memory_lines import MemoryLine


@dataclass(frozen=True)
class PackFolder:
    """A folder for packed layers, on a disk of its own.

    Attributes:
        rate: bytes per second that its disk reads.
        n_bytes: of packed layers that it would hold.
        free: bytes on its disk.
    """

    path: str
    rate: float
    n_bytes: int
    free: int

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "path": self.path,
            "bytes_per_second": round(self.rate),
            "bytes": self.n_bytes,
            "free_bytes": self.free,
        }


@dataclass(frozen=True)
class PlanReport:
    """A report on how a load would run on this machine.

    Attributes:
        plain: decoding without a drafter.
        sizes: each size of tree with the drafter that a load takes, on prose; one node comes first.
        code_sizes: the same on code.
        drafter: that a load takes; "none" if none could draft.
        exact: whether decoding is exact; None if that is found out while loading.
        threads: that passes compute with.
        kv: type of cached keys and values.
        cache_bytes: of the target's keys and values, for a text that fills the context.
        adapter_bytes: of LoRA adapters.
        memory: what takes the memory, line by line.
        pack_folders: those that were named for packed layers and can be used; empty if nothing is streamed.
        notes: where the figures come from, and how far they can be trusted.
        uncertain: some of them are derived, and may be off by half.
        context: most tokens of a text, as a load would have it.
        projector: by which the model sees; None if it does not.
        image_bytes: of the memory limit that are reserved for reading images.
    """

    model: str
    plain: Prediction
    sizes: tuple[Prediction, ...]
    code_sizes: tuple[Prediction, ...]
    drafter: str = "none"
    exact: bool | None = None
    threads: int = 1
    kv: str = "f16"
    cache_bytes: int = 0
    adapter_bytes: int = 0
    memory: list[MemoryLine] = field(default_factory=list)
    pack_folders: list[PackFolder] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uncertain: bool = False
    context: int = 0
    projector: ProjectorFacts | None = None
    image_bytes: int = 0

    @property
    def chosen(self) -> Prediction:
        """The fastest way to run what is loaded, on prose."""
        return best(self.sizes)

    @property
    def ways(self) -> dict[str, Prediction]:
        """Decoding without drafts, and the fastest with them, by kind of text."""
        return {"plain": self.plain, "prose": self.chosen, "code": best(self.code_sizes)}

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
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
            "memory": [line.to_json() for line in self.memory],
            "pack_folders": [folder.to_json() for folder in self.pack_folders],
            "projector": None if self.projector is None else self.projector.to_json(),
            "image_bytes": self.image_bytes,
            "notes": self.notes,
            "uncertain": self.uncertain,
        }
