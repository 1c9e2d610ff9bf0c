"""A plan: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgespec.costs.batches import BatchPrediction, SequenceCells, fewest_sequences
from edgespec.costs.planner import PlanComparison, Prediction
from edgespec.costs.prompts import PromptTime
from edgespec.images.facts import ProjectorFacts
from edgespec.planning.report.memory_lines import MemoryLine


@dataclass(frozen=True)
class BatchPlan:
    """The number of sequences answered at once.

    Attributes:
        cells: the memory of a sequence in the KV cache.
        most: sequences that the memory has room for beside the weights that stay in it for a single one;
            where weights are streamed, beside as few weights as possible.
        sizes: the speed with each number of sequences; a single one is plain decoding.
    """

    cells: SequenceCells
    most: int
    sizes: list[BatchPrediction]

    @property
    def fastest(self) -> BatchPrediction:
        """The number with the highest speed."""
        return max(self.sizes, key=lambda size: size.tokens_per_second)

    @property
    def chosen(self) -> BatchPrediction:
        """The fewest sequences that come close to that."""
        return fewest_sequences(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "cell_bytes": self.cells.cell_bytes,
            "text_tokens": self.cells.tokens,
            "most_texts": self.most,
            "fastest": self.fastest.to_json(),
            "chosen": self.chosen.to_json(),
            "sizes": [size.to_json() for size in self.sizes],
        }


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
        comparison: the ways to run, and what would help.
        batch: many sequences at once.
        drafter: that a load takes; "none" if none could draft.
        exact: whether decoding is exact; None if that is found out while loading.
        threads: that passes compute with.
        kv: type of cached keys and values.
        cache_bytes: of the target's keys and values, for a text that fills the context.
        adapter_bytes: of LoRA adapters.
        memory: what takes the memory, line by line.
        pack_folders: those that were named for packed layers and can be used; empty if nothing is streamed.
        prompts: how long prompts take to be read, each in a context that holds it, by their tokens; None for
            those that the model or the memory has no room for.
        notes: where the figures come from, and how far they can be trusted.
        uncertain: some of them are derived, and may be off by half.
        context: most tokens of a text, as a load would have it.
        trained_context: tokens that the model was made for; 0 if its file does not say.
        projector: by which the model sees; None if it does not.
        image_bytes: of the memory limit that are reserved for reading images.
    """

    model: str
    comparison: PlanComparison
    batch: BatchPlan
    drafter: str = "none"
    exact: bool | None = None
    threads: int = 1
    kv: str = "f16"
    cache_bytes: int = 0
    adapter_bytes: int = 0
    memory: list[MemoryLine] = field(default_factory=list)
    pack_folders: list[PackFolder] = field(default_factory=list)
    prompts: dict[int, PromptTime | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    uncertain: bool = False
    context: int = 0
    trained_context: int = 0
    projector: ProjectorFacts | None = None
    image_bytes: int = 0

    @property
    def chosen(self) -> Prediction:
        """The fastest way to run what is loaded."""
        return self.comparison.chosen

    @property
    def plain(self) -> Prediction:
        """Decoding without a drafter."""
        return self.comparison.plain

    @property
    def sizes(self) -> list[Prediction]:
        """Every tree size with the drafter that is loaded."""
        return list(self.comparison.sizes)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        compared = self.comparison
        return {
            "model": self.model,
            "chosen": self.chosen.to_json(),
            "plain": self.plain.to_json(),
            "drafter": self.drafter,
            "exact": self.exact,
            "threads": self.threads,
            "sizes": [size.to_json() for size in self.sizes],
            "ways": [way.to_json() for way in (compared.chosen, *compared.alternatives)],
            "alternatives": [way.to_json() for way in compared.alternatives],
            "bottleneck": compared.bottleneck.to_json(),
            "advice": [change.to_json() for change in compared.advice],
            "batch": self.batch.to_json(),
            "kv": self.kv,
            "cache_bytes": self.cache_bytes,
            "adapter_bytes": self.adapter_bytes,
            "memory": [line.to_json() for line in self.memory],
            "pack_folders": [folder.to_json() for folder in self.pack_folders],
            "prompts": [
                {"tokens": tokens, "seconds": None} if time is None else time.to_json()
                for tokens, time in self.prompts.items()
            ],
            "projector": None if self.projector is None else self.projector.to_json(),
            "image_bytes": self.image_bytes,
            "notes": self.notes,
            "uncertain": self.uncertain,
        }
