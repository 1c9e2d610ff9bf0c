"""Initial costs of passes and draft steps, for sizing the first trees: stored, or measured quickly."""

from __future__ import annotations

from dataclasses import replace

from edgespec.base.progress import Progress
from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import SLOWDOWN_BESIDE_READS, RoundCosts, even_step, read_seconds
from edgespec.engine.target import Target
from edgespec.llama.first_layers import FirstLayers
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.measure.draft_steps import quick_steps
from edgespec.measure.passes import passes_by_first_layers, quick_passes
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.profiles.store import DraftProfile, PassProfile, ProfileKeys, ProfileStore, disk_key
from edgespec.speculation.drafters.base import Drafter

_ROWS = 32  # nodes of a usual tree
_PATIENCE_S = 8.0  # most time to measure passes before a first answer


def initial_costs(
    target: Target,
    drafter: Drafter,
    width: int,
    keys: ProfileKeys,
    on_progress: Progress,
    store: ProfileStore,
    notes: list[str] | None = None,
    first_layers: FirstLayers | None = None,
) -> RoundCosts:
    """The costs of the pair's passes and draft steps; what is not stored yet is measured and stored.

    Where a pass takes so long that a person would wait for the measurement, the sizes that were not measured
    are derived from how fast the processor multiplies. What was measured while other programs kept the
    processor busy is used until the next start, which measures it again.

    Args:
        width: most rows of a draft step.
        notes: gets a sentence if the passes were measured on a busy machine.
        first_layers: of a streamed target whose passes have no rows of padding; these are timed instead of
            whole passes, which take seconds each.

    Raises:
        DecodeAborted: stopped from outside.
        BackendError: llama.cpp cannot multiply here.
    """
    passes, drafts = store.passes(keys.passes), store.drafts(keys.drafts)
    n_bytes, disks = target.model.weights.streamed_bytes, len(target.model.weights.disk_rates) or 1
    if passes is not None and n_bytes and passes.disks != disks:
        passes = replace(passes.on_disks(disks), read_rate=_known_rate(target, store))
        store.put(keys.passes, passes)
    if passes is None or passes.disturbed or (n_bytes and not passes.read_rate):
        on_progress("Measuring this machine (once per model)", 0.0)

        estimates = DerivedPasses(store, target.context.n_threads, on_progress)

        def derived(known: PassProfile | None = passes) -> Curve:
            if known is not None:
                return known.compute
            headers = ModelFiles.of(read_header(target.model.path)).headers
            curve = estimates.curve(headers)
            return curve.scaled(SLOWDOWN_BESIDE_READS) if n_bytes else curve

        measured = None if first_layers is None else passes_by_first_layers(target, first_layers)
        if measured is not None:  # the ring alone was read, which says little of a disk
            measured = replace(measured, read_rate=_known_rate(target, store) or measured.read_rate)
        measured = measured or quick_passes(target, _PATIENCE_S, derived)
        if estimates.disturbed:
            measured = replace(measured, busy=1.0)
        passes = better(passes, measured)
        store.put(keys.passes, passes)
        if passes.disturbed and notes is not None:
            notes.append(
                "Other programs kept the processor busy while passes were measured, so the first trees may "
                "have the wrong size. Passes are measured again at the next start."
            )
    if drafts is None or drafts.disturbed:
        drafts = quicker(drafts, quick_steps(drafter, width, target.context.n_threads))
        if drafts is not None:
            store.put(keys.drafts, drafts)
    read_s = read_seconds(n_bytes, passes.read_rate)
    costs = RoundCosts(passes.compute, read_s=read_s, overlap=passes.overlap)
    if drafts is None:
        return costs
    step_s, row_s = even_step(drafts.step, width, drafts.overhead)
    return replace(costs, step_s=step_s, row_s=row_s)


def _known_rate(target: Target, store: ProfileStore) -> float:
    """Bytes per second that arrived from the target's disk in earlier passes of any model; 0 if unknown.

    Of several disks, the speed of each may also be that of reads without passes.
    """
    weights = target.model.weights
    try:
        if weights.disk_rates:
            disks = [store.disk(disk_key(path)) for path in weights.disk_rates]
            return 0.0 if None in disks else sum(disk.speed for disk in disks if disk is not None)
        disk = store.disk(disk_key(weights.paths[0]))
    except (OSError, IndexError):
        return 0.0
    return 0.0 if disk is None else disk.streamed_rate


def better(known: PassProfile | None, measured: PassProfile) -> PassProfile:
    """The better of two profiles: the undisturbed one, or else the faster one, which was disturbed less."""
    if known is None or not measured.disturbed or (measured.read_rate and not known.read_rate):
        return measured
    return min(known, measured, key=lambda profile: profile.compute.at(1) + profile.compute.at(_ROWS))


def quicker(known: DraftProfile | None, measured: DraftProfile | None) -> DraftProfile | None:
    """The better of two profiles of draft steps, if there are any, by the same rules."""
    if known is None or measured is None or not measured.disturbed:
        return measured or known
    return min(known, measured, key=lambda profile: profile.step.at(1))
