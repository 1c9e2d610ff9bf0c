"""A plan: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgespec.costs.batches import BatchPrediction, SequenceCells
from edgespec.costs.planner import Advice, PlanComparison, Prediction
from edgespec.costs.prompts import PromptTime


@dataclass(frozen=True)
class BatchPlan:
    """The number of texts answered at once.

    Attributes:
        cells: the memory of a text in the KV cache.
        most: texts that the memory has room for beside the weights that stay in it for a single text; where
            weights are streamed, beside as few weights as possible.
        chosen: the fewest texts that come close to the highest speed.
        sizes: what other numbers of texts would give.
    """

    cells: SequenceCells
    most: int
    chosen: BatchPrediction
    sizes: list[BatchPrediction]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "cell_bytes": self.cells.cell_bytes,
            "text_tokens": self.cells.tokens,
            "most_texts": self.most,
            "chosen": self.chosen.to_json(),
            "sizes": [size.to_json() for size in self.sizes],
        }


@dataclass(frozen=True)
class PlanReport:
    """A report on how a model would run on this machine, and on the ways that were compared.

    Attributes:
        comparison: the ways to run that were compared; the choice is the fastest of them.
        advice: what would help most.
        prompts: how long prompts take to be read, each in a context that holds it, by their tokens; None for
            those that the model or the memory has no room for.
        batch: many texts at once.
        kv: type of cached keys and values.
        cache_bytes: of the target's keys and values, for a text that fills the context.
        adapter_bytes: of LoRA adapters.
        notes: where the figures come from, and how far they can be trusted.
        uncertain: some of them are derived, and may be off by half.
    """

    model: str
    comparison: PlanComparison
    advice: list[Advice]
    batch: BatchPlan
    kv: str = "f16"
    cache_bytes: int = 0
    adapter_bytes: int = 0
    prompts: dict[int, PromptTime | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    uncertain: bool = False

    @property
    def chosen(self) -> Prediction:
        """The fastest way to run."""
        return self.comparison.fastest

    @property
    def plain(self) -> Prediction:
        """Decoding without drafts."""
        return self.comparison.plain

    @property
    def ways(self) -> list[Prediction]:
        """Plain decoding and the best tree of every drafter, the fastest first."""
        return self.comparison.by_drafter

    @property
    def sizes(self) -> list[Prediction]:
        """Plain decoding, and every tree size with every drafter."""
        return self.comparison.all

    @property
    def drafter(self) -> str:
        """The drafter whose trees are the fastest; "none" if none could draft."""
        plain = self.plain
        return next((way.drafter for way in self.ways if way is not plain), plain.drafter)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "model": self.model,
            "chosen": self.chosen.to_json(),
            "plain": self.plain.to_json(),
            "drafter": self.drafter,
            "ways": [way.to_json() for way in self.ways],
            "sizes": [size.to_json() for size in self.sizes],
            "advice": [advice.to_json() for advice in self.advice],
            "batch": self.batch.to_json(),
            "kv": self.kv,
            "cache_bytes": self.cache_bytes,
            "adapter_bytes": self.adapter_bytes,
            "prompts": [
                {"tokens": tokens, "seconds": None} if time is None else time.to_json()
                for tokens, time in self.prompts.items()
            ],
            "notes": self.notes,
            "uncertain": self.uncertain,
        }
