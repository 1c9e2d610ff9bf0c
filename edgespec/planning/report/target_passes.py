"""Seconds of a model's passes here: measured with the model itself, or derived from its weights."""

from __future__ import annotations

from pathlib import Path

from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.costs.curves import Curve
from edgespec.costs.planner import TargetPasses
from edgespec.files.user_folders import cache_folder, nearest_existing
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.measure.throughput import measure_reading
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import InspectedModel
from edgespec.planning.pack_folders import ONE_DISK, Disks
from edgespec.planning.pass_costs import passes_of
from edgespec.profiles.store import (
    DiskProfile,
    PassProfile,
    ProfileStore,
    disk_key,
)

_DISK_S = 3.0  # to measure the disk, unless passes have told its speed


class PassCosts:
    """Passes with one number of threads, on this machine.

    Args:
        threads: what passes compute with.
        disks: that packed layers are spread over.
        derived: of models that were not measured; None measures anew what it needs.
    """

    def __init__(
        self,
        store: ProfileStore,
        threads: int,
        on_progress: Progress,
        disks: Disks = ONE_DISK,
        derived: DerivedPasses | None = None,
    ) -> None:
        self._store = store
        self._threads = threads
        self._on_progress = on_progress
        self._disks = disks
        self._derived = derived or DerivedPasses(store, threads, on_progress)

    def of_target(self, model: InspectedModel, *, streams: bool, padded: bool) -> tuple[TargetPasses, str]:
        """The target's passes, and a sentence that says where the figures come from.

        Args:
            padded: whether passes are padded to the rows of exact decoding.
        """
        own = self._store.preferred_passes(model.headers[0].fingerprint, self._threads, streams=streams)
        if own is not None:
            own = own.on_disks(self._disks.n)
        known = own or self._derived.curve(model.headers)
        rate, rate_source = 0.0, ""
        if streams:
            rate, rate_source = self._disk_rate(model, own)
        source = (
            "Passes: measured with this model on this machine"
            if own
            else "Passes: derived from how fast this processor multiplies"
        )
        if own and own.quick:
            source += ", quickly"
        if own.disturbed if own else self._derived.disturbed:
            source += ", while other programs kept the processor busy (the real speed may be higher)"
        passes = passes_of(known, rate, streams=streams, padded=padded)
        return passes, f"{source}{rate_source}."

    def derived_curve(self, model: ModelFiles) -> Curve:
        """Seconds by rows of a model that was not measured."""
        return self._derived.curve(model.headers)

    def _disk_rate(self, model: InspectedModel, own: PassProfile | None) -> tuple[float, str]:
        """Bytes that the disk reads per second, unless passes were timed with it; and the figure's source."""
        if own is not None and own.read_rate:
            return 0.0, ", including reading"
        if self._disks.folders:
            rates = self._disks.rates(self._store, self._on_progress)
            what = "the disk reads" if len(rates) == 1 else f"{len(rates)} disks read"
            return sum(rates), f"; {what} {readable(sum(rates))}/s"
        place = model.path or nearest_existing(cache_folder())
        disk = self._store.disk(disk_key(place))
        if disk is None and model.path is not None:
            disk = self._measured_disk(model.path)
        if disk is None:
            disk = self._measured_disk(catalog.find(None))
        return disk.speed, f"; the disk reads {readable(disk.speed)}/s"

    def _measured_disk(self, path: Path) -> DiskProfile:
        disk = measure_reading(path, _DISK_S, self._on_progress)
        self._store.put(disk_key(path), disk)
        return disk
