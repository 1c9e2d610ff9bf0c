"""The memory budget that holds a given share of a mixture's experts."""

from __future__ import annotations

from edgespec.config import Config
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.budget import plan_memory
from edgespec.planning.memory.needs import ContextShape, PairSizes
from edgespec.planning.memory.rows import PrefillFacts, needs_within

_STEP = 1 << 20  # bytes; finer would be finer than what is known of the process


def budget_for_experts(
    files: ModelFiles, config: Config, shape: ContextShape, share: float, prefill: PrefillFacts
) -> int:
    """The least budget under which this share of the experts is in memory at a time, without a drafter.

    It is found by bisection: more memory never holds fewer experts.

    Args:
        share: of all layers' experts, from 0 to 1. No budget holds fewer than one layer's.
        prefill: as for `needs_within`.

    Raises:
        ValueError: the model has no experts that could be streamed one by one.
        ModelFileError: llama.cpp cannot load it.
    """
    if not layer_weights(files).experts:
        raise ValueError("the model has no experts")

    config, sizes = config.with_(offload="stream"), PairSizes(files, None, shape, measured=True)

    def holds(budget: int) -> bool:
        try:
            needs = needs_within(sizes, files, budget, config, prefill)
            experts = plan_memory(needs, files, budget, config).holding.experts
        except MemoryLimitError:
            return False
        return experts is not None and experts.held >= share

    low, high = 0, files.tensor_bytes
    while not holds(high):
        low, high = high, 2 * high
    while high - low > _STEP:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
