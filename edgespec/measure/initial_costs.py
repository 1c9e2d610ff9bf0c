"""Initial costs of passes and draft steps, for sizing the first trees: stored, or measured quickly."""

from __future__ import annotations

from edgespec.costs.pass_time import Costs, even_step, streamed_curve
from edgespec.engine.target import Target
from edgespec.measure.draft_steps import quick_steps
from edgespec.measure.passes import passes_by_first_layers, quick_passes
from edgespec.models.llama.first_layers import FirstLayers
from edgespec.profiles.store import Keys, PassProfile, ProfileStore
from edgespec.progress import Progress
from edgespec.speculation.drafters.base import Drafter

_ROWS = 32  # nodes of a usual tree
_PATIENCE_S = 8.0  # most time to measure passes before a first answer


def initial_costs(
    target: Target,
    drafter: Drafter,
    width: int,
    keys: Keys,
    on_progress: Progress,
    store: ProfileStore | None = None,
    notes: list[str] | None = None,
    first_layers: FirstLayers | None = None,
) -> Costs | None:
    """The costs of the pair's passes and draft steps; what is not stored yet is measured and stored.

    None if a pass takes so long that they are better learned while answering. Passes that were measured while
    other programs kept the processor busy are used until the next start, which measures them again.

    Args:
        width: most rows of a draft step.
        notes: gets a sentence if the passes were measured on a busy machine.
        first_layers: of a streamed target whose passes have no rows of padding; these are timed instead of
            whole passes, which take seconds each.

    Raises:
        DecodeAborted: stopped from outside.
    """
    store = store or ProfileStore()
    passes, drafts = store.passes(keys.passes), store.drafts(keys.drafts)
    n_bytes = target.model.weights.streamed_bytes
    if passes is None or passes.disturbed or (n_bytes and not passes.read_rate):
        on_progress("Measuring this machine (once per model)", 0.0)
        measured = None if first_layers is None else passes_by_first_layers(target, first_layers)
        if measured is None:
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
    """The better of two profiles: the undisturbed one, or else the faster one, which was disturbed less.

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
