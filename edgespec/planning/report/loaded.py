"""The speed to expect of a model that is loaded, from what was measured of it and of its drafter."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import DraftingCosts, alternatives, best, predict
from edgespec.generation.result import MemoryUse
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.planning.pass_costs import passes_of
from edgespec.profiles.store import ProfileKeys, ProfileStore

_WORTH_SAYING = 0.05  # of the gain of another way to run


@dataclass(frozen=True)
class ExpectedSpeed:
    """The speed to expect."""

    tokens_per_second: float  # with drafts if their yield was measured, and else without
    drafted: bool
    alone: float = 0.0  # tokens per second if weights had the drafter's memory; 0 if not predicted

    @property
    def advice(self) -> str:
        """A sentence if decoding without the drafter would be faster; else empty."""
        gain = self.alone / self.tokens_per_second - 1
        return f"--draft none would be about {gain:.0%} faster." if gain >= _WORTH_SAYING else ""


def expected_speed(
    keys: ProfileKeys, memory: MemoryUse, temperature: float, store: ProfileStore
) -> ExpectedSpeed | None:
    """The speed of a loaded pair; None if the passes of this model were not measured.

    Args:
        keys: of the loaded pair.
        memory: where its weights are.
    """
    profile = store.passes(keys.passes)
    if profile is None or (memory.streamed_bytes_per_pass and not profile.read_rate):
        return None
    streamed = memory.streamed_bytes_per_pass
    passes = passes_of(profile, streams=streamed > 0)

    def holding(freed: int) -> PlannedWeights:
        """The places of weights if so many bytes more of them were in memory."""
        budget, resident = memory.budget_bytes, memory.resident_bytes
        return PlannedWeights(budget, budget, resident + freed, streamed - freed)

    def plain(freed: int = 0) -> float:
        return predict(holding(freed), passes, DraftingCosts("none"), 1).tokens_per_second

    yields, steps = store.yields_at(keys, temperature), store.drafts(keys.drafts)
    if yields is None or steps is None:
        return ExpectedSpeed(plain(), drafted=False)
    drafting = DraftingCosts("drafter", yields, steps.step, steps.overhead)
    fastest = best(alternatives(holding(0), passes, drafting, USUAL_NODES))
    drafter_bytes = memory.resident_bytes + streamed - memory.target_bytes if memory.target_bytes else 0
    freed = min(max(drafter_bytes, 0), streamed)
    return ExpectedSpeed(fastest.tokens_per_second, drafted=True, alone=plain(freed) if freed else 0.0)
