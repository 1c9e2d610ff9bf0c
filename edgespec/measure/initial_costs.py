"""What trees cost on this machine, before the first one grows: remembered, or measured in a hurry."""

from __future__ import annotations

from edgespec.costs.pass_time import Costs, even_step, streamed_curve
from edgespec.engine.target import Target
from edgespec.measure.profiler import quick_passes, quick_steps
from edgespec.profiles.store import Keys, PassProfile, ProfileStore
from edgespec.progress import Progress
from edgespec.speculation.drafters.base import Drafter

_ROWS = 32  # of a usual tree
_PATIENCE_S = 8.0  # for passes, before a first answer


def initial_costs(
    target: Target,
    drafter: Drafter,
    width: int,
    keys: Keys,
    on_progress: Progress,
    store: ProfileStore | None = None,
    notes: list[str] | None = None,
) -> Costs | None:
    """The costs of the pair's passes and draft steps; what is not known is measured and kept.

    None where a pass takes so long that an answer is the better way to find out. Passes that were measured
    while other programs kept the processor busy are used for want of better ones, and measured again at the
    next start.

    Args:
        width: most rows of a draft step.
        notes: gets a sentence if the figures are of that kind.

    Raises:
        DecodeAborted: stopped from outside.
    """
    store = store or ProfileStore()
    passes, drafts = store.passes(keys.passes), store.drafts(keys.drafts)
    n_bytes = target.model.weights.streamed_bytes
    if passes is None or passes.disturbed or (n_bytes and not passes.read_rate):
        on_progress("Measuring this machine (once a model)", 0.0)
        measured = quick_passes(target, _PATIENCE_S)
        if measured is None and passes is None:
            return None
        passes = better(passes, measured)
        store.put(keys.passes, passes)
        if passes.disturbed and notes is not None:
            notes.append(
                "Other programs kept the processor busy while passes were measured, so the first trees may "
                "have the wrong size. Passes are measured again at the next start."
            )
    if drafts is None:
        drafts = quick_steps(drafter, width)
        if drafts is not None:
            store.put(keys.drafts, drafts)
    verify = streamed_curve(passes.compute, n_bytes, passes.read_rate)
    if drafts is None:
        return Costs(verify)
    return Costs(verify, *even_step(drafts.step, width, drafts.overhead))


def better(known: PassProfile | None, measured: PassProfile | None) -> PassProfile:
    """The profile to go by: the one that was not disturbed; of two that were, the faster, which was less so.

    Raises:
        ValueError: there is neither.
    """
    if known is None or measured is None:
        found = known or measured
        if found is None:
            raise ValueError("there is nothing to choose from")
        return found
    if not measured.disturbed or (measured.read_rate and not known.read_rate):
        return measured
    return min(known, measured, key=lambda profile: profile.compute.at(1) + profile.compute.at(_ROWS))
