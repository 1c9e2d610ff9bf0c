"""Seconds of a model's passes here: measured with the model itself, or derived from its weights."""

from __future__ import annotations

from pathlib import Path

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import SLOWDOWN_BESIDE_READS, USUAL_OVERLAP
from edgespec.costs.planner import TargetPasses
from edgespec.files.user_folders import cache_folder
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.measure.throughput import measure_reading
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import InspectedModel
from edgespec.models.llama.row_rule import SPARING
from edgespec.profiles.store import (
    DiskProfile,
    PassProfile,
    ProfileStore,
    disk_key,
)
from edgespec.progress import Progress
from edgespec.units import readable

DIRECT_SHARE = 0.95  # of the disk's speed that reaches passes
NO_OVERLAP = 1.0  # a layer's experts are known only when they are needed, so nothing hides their reading
_DISK_S = 1.0


class PassCosts:
    """Passes with one number of threads, on this machine.

    Args:
        threads: what passes compute with.
    """

    def __init__(self, store: ProfileStore, threads: int, on_progress: Progress) -> None:
        self._store = store
        self._threads = threads
        self._on_progress = on_progress
        self._derived = DerivedPasses(store, threads, on_progress)

    def of_target(self, model: InspectedModel, *, streams: bool, padded: bool) -> tuple[TargetPasses, str]:
        """The target's passes, and a sentence that says where the figures come from.

        Args:
            padded: whether passes are padded to the rows of exact decoding.
        """
        own = self._store.preferred_passes(model.headers[0].fingerprint, self._threads, streams=streams)
        compute = own.compute if own else self._derived.curve(model.headers)
        streamed = own is not None and own.streamed
        if streams and not streamed:
            compute = compute.scaled(SLOWDOWN_BESIDE_READS)
            compute = _padded(compute) if padded else compute
        rate, rate_source = 0.0, ""
        if streams:
            rate, rate_source = self._read_rate(model, own)
        source = (
            "Passes: measured with this model on this machine"
            if own
            else "Passes: derived from how fast this processor multiplies"
        )
        if own and own.quick:
            source += ", quickly"
        if own.disturbed if own else self._derived.disturbed:
            source += ", while other programs kept the processor busy (so they may be faster)"
        passes = TargetPasses(
            compute,
            rate,
            own.accept_s if own else 0.0,
            own.overlap if own and streamed else USUAL_OVERLAP,
            measured=own is not None and not own.disturbed,
        )
        return passes, f"{source}{rate_source}."

    def derived_curve(self, model: ModelFiles) -> Curve:
        """Seconds by rows of a model that was not measured."""
        return self._derived.curve(model.headers)

    def attend_s(self, model: InspectedModel) -> float:
        """Seconds in which a row of a model attends to a cell."""
        return self._derived.attend_s(model.headers[0])

    def _read_rate(self, model: InspectedModel, own: PassProfile | None) -> tuple[float, str]:
        """Bytes of weights that will arrive per second, and where that figure comes from."""
        if own is not None and own.read_rate:
            return own.read_rate, ", including reading"
        place = model.path or _nearest_existing(cache_folder())
        disk = self._store.disk(disk_key(place))
        if disk is None and model.path is not None:
            disk = self._measured_disk(model.path)
        if disk is None:
            disk = self._measured_disk(catalog.find(None))
        return disk.speed * DIRECT_SHARE, f"; the disk reads {readable(disk.speed)}/s"

    def _measured_disk(self, path: Path) -> DiskProfile:
        disk = measure_reading(path, _DISK_S, self._on_progress)
        self._store.put(disk_key(path), disk)
        return disk


def _padded(compute: Curve) -> Curve:
    """Seconds of passes that are padded, from those that are not."""
    rule = SPARING.rules[0]
    padded = [(rows, compute.at(rule.padded(rows))) for rows in range(1, rule.maximum + 1)]
    longer = [point for point in zip(compute.rows, compute.seconds, strict=True) if point[0] > rule.maximum]
    if not longer:
        longer = [(2 * rule.maximum, compute.at(2 * rule.maximum))]
    return Curve.through([*padded, *longer])


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
