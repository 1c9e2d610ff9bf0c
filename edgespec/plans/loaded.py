"""The speed to expect of a model that is loaded, from what was measured of it and of its drafter."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import DraftingCosts, alternatives, best, predict
from edgespec.generation.result import MemoryUse
from edgespec.loading.pass_costs import passes_of
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.profiles.store import ProfileKeys, ProfileStore


@dataclass(frozen=True)
class ExpectedSpeed:
    """The speed to expect.

    Attributes:
        tokens_per_second: with drafts if their yield was measured, and else without.
        drafted: whether it is with drafts.
    """

    tokens_per_second: float
    drafted: bool


def expected_speed(
    keys: ProfileKeys, memory: MemoryUse, temperature: float, store: ProfileStore | None = None
) -> ExpectedSpeed | None:
    """The speed of a loaded pair; None if the passes of this model were not measured.

    Args:
        keys: of the loaded pair.
        memory: where its weights are.
    """
    store = store or ProfileStore()
    profile = store.passes(keys.passes)
    if profile is None or (memory.streamed_bytes_per_pass and not profile.read_rate):
        return None
    holding = PlannedWeights(
        memory.budget_bytes, memory.budget_bytes, memory.resident_bytes, memory.streamed_bytes_per_pass
    )
    passes = passes_of(profile, streams=memory.streamed_bytes_per_pass > 0)
    plain = predict(holding, passes, DraftingCosts("none"), 1)
    yields, steps = store.yields_at(keys, temperature), store.drafts(keys.drafts)
    if yields is None or steps is None:
        return ExpectedSpeed(plain.tokens_per_second, drafted=False)
    drafting = DraftingCosts("drafter", yields, steps.step, steps.overhead)
    fastest = best(alternatives(holding, passes, drafting, USUAL_NODES))
    return ExpectedSpeed(fastest.tokens_per_second, drafted=True)
