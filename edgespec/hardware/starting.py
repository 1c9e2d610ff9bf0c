"""What trees cost on this machine, before the first one grows: remembered, or measured in a hurry."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.hardware.curves import Costs
from edgespec.hardware.profiler import quick_passes, quick_steps
from edgespec.hardware.profiles import Keys, ProfileStore
from edgespec.hardware.stream_rate import streamed_bytes
from edgespec.speculation.drafters.base import Drafter
from edgespec.target import Target

_PATIENCE_S = 8.0  # for passes, before a first answer


def starting_costs(
    target: Target,
    drafter: Drafter,
    width: int,
    keys: Keys,
    on_progress: Callable[[str, float], None],
    store: ProfileStore | None = None,
) -> Costs | None:
    """The costs of the pair's passes and draft steps; what is not known is measured and kept.

    None where a pass takes so long that an answer is the better way to find out.

    Args:
        width: most rows of a draft step.

    Raises:
        DecodeAborted: stopped from outside.
    """
    store = store or ProfileStore()
    passes, drafts = store.passes(keys.passes), store.drafts(keys.drafts)
    n_bytes = streamed_bytes(target)
    if passes is None or (n_bytes and not passes.read_rate):
        on_progress("Measuring this machine (once a model)", 0.0)
        passes = quick_passes(target, _PATIENCE_S)
        if passes is None:
            return None
        store.put(keys.passes, passes)
    if drafts is None:
        drafts = quick_steps(drafter, width)
        if drafts is not None:
            store.put(keys.drafts, drafts)
    verify = passes.compute
    if n_bytes:
        verify = verify.floored(n_bytes / passes.read_rate)
    if drafts is None:
        return Costs(verify)
    first, last = drafts.step.at(1) * drafts.overhead, drafts.step.at(width) * drafts.overhead
    return Costs(verify, first, (last - first) / max(width - 1, 1))
