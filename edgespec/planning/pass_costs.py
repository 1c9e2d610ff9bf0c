"""The time of the target's passes, as far as it is known while its memory is planned."""

from __future__ import annotations

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import SLOWDOWN_BESIDE_READS, USUAL_OVERLAP
from edgespec.costs.planner import TargetPasses
from edgespec.costs.prompts import usual_prompt
from edgespec.files.user_folders import cache_folder
from edgespec.llama.prefill_chunks import lengths_that_differ
from edgespec.llama.row_rule import SPARING
from edgespec.measure.derived_passes import known_curve
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import read_rate
from edgespec.planning.memory.rows import PrefillFacts
from edgespec.planning.pack_folders import ONE_DISK, Disks
from edgespec.profiles.store import PassProfile, ProfileStore

_DIRECT_SHARE = 0.95  # of the disk's speed that reaches passes


def expected_prefill(
    files: ModelFiles,
    context: int,
    threads: int,
    store: ProfileStore,
    *,
    own_kernels: bool = False,
    disks: Disks = ONE_DISK,
) -> PrefillFacts:
    """Inputs for choosing the prefill chunk size in a context of so many tokens."""
    differ = lengths_that_differ(cache_folder() / "rows", files.headers[0].fingerprint)
    passes = expected_passes(files, threads, store, disks)
    return PrefillFacts(passes, usual_prompt(context), own_kernels, frozenset(differ))


def expected_passes(
    files: ModelFiles, threads: int, store: ProfileStore, disks: Disks = ONE_DISK
) -> TargetPasses:
    """Passes over streamed weights: measured with this model, or derived; nothing is measured now."""
    own = store.preferred_passes(files.headers[0].fingerprint, threads, streams=True)
    known = known_curve(files.headers, store, threads) if own is None else own.on_disks(disks.n)
    return passes_of(known, disks.read_rate(store) or read_rate(files, store), streams=True)


def passes_of(
    known: PassProfile | Curve, disk_rate: float = 0.0, *, streams: bool, padded: bool = False
) -> TargetPasses:
    """Passes of a target whose weights are streamed or not, from what is known of it.

    Args:
        known: its measured passes, or seconds by rows that were derived from other models'.
        disk_rate: bytes that the disk reads per second, for weights whose arrival was not timed.
        padded: whether streamed passes are padded to the rows of exact decoding.
    """
    own = known if isinstance(known, PassProfile) else PassProfile(known)
    compute, rate = own.compute, 0.0
    if streams:
        rate = own.read_rate or _DIRECT_SHARE * disk_rate
    if streams and not own.streamed:
        compute = compute.scaled(SLOWDOWN_BESIDE_READS)
        compute = _padded(compute) if padded else compute
    return TargetPasses(
        compute,
        rate,
        own.accept_s,
        own.overlap if own.streamed else USUAL_OVERLAP,
        measured=own is known and not own.disturbed,
    )


def _padded(compute: Curve) -> Curve:
    """Seconds of passes that are padded, from those that are not."""
    rule = SPARING.rules[0]
    padded = [(rows, compute.at(rule.padded(rows))) for rows in range(1, rule.maximum + 1)]
    longer = [point for point in zip(compute.rows, compute.seconds, strict=True) if point[0] > rule.maximum]
    if not longer:
        longer = [(2 * rule.maximum, compute.at(2 * rule.maximum))]
    return Curve.through([*padded, *longer])
