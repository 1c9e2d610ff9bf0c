"""The speed to expect of a model that is loaded, from what was measured of it and of its drafter."""

from __future__ import annotations

from edgespec.costs.planned_memory import PlannedMemory
from edgespec.costs.planner import Comparison, Drafting, Passes, alternatives
from edgespec.generation.result import MemoryUse
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.profiles.store import Keys, ProfileStore


def expected_speed(
    keys: Keys, memory: MemoryUse, temperature: float, store: ProfileStore | None = None
) -> float | None:
    """Tokens per second; None if this model's passes were not measured.

    Where it was not measured what trees of the drafter yield, this is the speed of plain decoding: drafting
    that does not pay is switched off.

    Args:
        keys: of the loaded pair.
        memory: where its weights are.
    """
    store = store or ProfileStore()
    profile = store.passes(keys.passes)
    if profile is None or (memory.streamed_bytes_per_pass and not profile.read_rate):
        return None
    holding = PlannedMemory(
        memory.budget_bytes, memory.budget_bytes, memory.resident_bytes, memory.streamed_bytes_per_pass
    )
    passes = Passes(profile.compute, profile.read_rate, profile.accept_s, profile.overlap)
    (plain,) = alternatives(holding, passes, Drafting("none"), 1)
    yields, steps = store.yields_at(keys, temperature), store.drafts(keys.drafts)
    if yields is None or steps is None:
        return plain.tokens_per_second
    drafting = Drafting("drafter", yields, steps.step, steps.overhead)
    trees = tuple(alternatives(holding, passes, drafting, USUAL_NODES)[1:])
    return Comparison(plain, (trees,)).fastest.tokens_per_second
