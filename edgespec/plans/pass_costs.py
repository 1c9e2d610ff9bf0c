"""What passes of a model take here: measured with the model itself, or derived from another's."""

from __future__ import annotations

import math
from pathlib import Path

from platformdirs import user_cache_path

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import USUAL_OVERLAP, curve_of_other_size
from edgespec.costs.planner import Passes
from edgespec.errors import EdgeSpecError
from edgespec.measure.throughput import measure_reading
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import InspectedModel
from edgespec.profiles.store import (
    DiskProfile,
    PassProfile,
    ProfileStore,
    disk_key,
    machine_identity,
)
from edgespec.progress import Progress
from edgespec.units import readable

_DIRECT_SHARE = 0.95  # of the disk's speed that reaches passes
_SLOWDOWN_BESIDE_READS = 1.05  # how much longer arithmetic takes while layers are read
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
        self._machine = machine_identity() | {"threads": str(threads)}

    def of_target(self, model: InspectedModel, *, streams: bool) -> tuple[Passes, str]:
        """The target's passes, and a sentence that says where the figures come from."""
        fingerprint = model.headers[0].fingerprint
        own = self._store.preferred_passes(fingerprint, self._threads, streams=streams)
        profile = own or self._reference(model)
        compute = profile.compute if own else _scaled_to(profile, model)
        if streams and not profile.streamed:
            compute = compute.scaled(_SLOWDOWN_BESIDE_READS)
        rate, rate_source = 0.0, ""
        if streams:
            rate, rate_source = self._read_rate(model, own)
        source = "Passes: measured with this model here" if own else "Passes: derived from another model's"
        overlap = profile.overlap if profile.streamed else USUAL_OVERLAP
        if own and own.quick:
            source += ", quickly"
        if profile.disturbed:
            source += ", while other programs kept the processor busy (so they may be faster)"
        passes = Passes(
            compute, rate, profile.accept_s, overlap, measured=own is not None and not own.disturbed
        )
        return passes, f"{source}{rate_source}."

    def derived_curve(self, model: InspectedModel) -> Curve:
        """Seconds by rows of a model that was not measured, from those of one that was."""
        return _scaled_to(self._reference(model), model)

    def _reference(self, model: InspectedModel) -> PassProfile:
        """The model measured in memory here that is nearest in size; the default model, if none was yet."""
        known = self._measured_in_memory()
        if not known:
            from edgespec.loading.load import load

            self._on_progress("Measuring this machine with the default model (once)", 0.0)
            load(draft="lookup", threads=self._threads, context=512, gpu_layers=0).close()
            known = self._measured_in_memory()
        if not known:  # even a pass of the default model took too long to be timed quickly
            raise EdgeSpecError(
                "This machine is too busy or too slow to be measured quickly.",
                "Close other programs, or measure with care: edgespec profile",
            )
        size = _parameters(model.headers)
        return min(
            known,
            key=lambda profile: (profile.disturbed, profile.quick, abs(math.log(profile.parameters / size))),
        )

    def _measured_in_memory(self) -> list[PassProfile]:
        return [profile for profile in self._store.all_passes(**self._machine) if not profile.streamed]

    def _read_rate(self, model: InspectedModel, own: PassProfile | None) -> tuple[float, str]:
        """Bytes of weights that will arrive per second, and where that figure comes from."""
        if own is not None and own.read_rate:
            return own.read_rate, ", including reading"
        place = model.path or _nearest_existing(user_cache_path("edgespec"))
        disk = self._store.disk(disk_key(place))
        if disk is None and model.path is not None:
            disk = self._measured_disk(model.path)
        if disk is None:
            disk = self._measured_disk(catalog.find(None))
        return disk.speed * _DIRECT_SHARE, f"; the disk reads {readable(disk.speed)}/s"

    def _measured_disk(self, path: Path) -> DiskProfile:
        disk = measure_reading(path, _DISK_S, self._on_progress)
        self._store.put(disk_key(path), disk)
        return disk


def _scaled_to(reference: PassProfile, model: InspectedModel) -> Curve:
    """The reference's passes for a model of another size; of its experts, those that a token needs count."""
    idle_bytes, idle = _idle(model.headers)
    n_bytes = sum(header.tensor_bytes for header in model.headers) - idle_bytes
    by_bytes = n_bytes / max(reference.weight_bytes, 1)
    by_parameters = (_parameters(model.headers) - idle) / max(reference.parameters, 1)
    return curve_of_other_size(reference.compute, by_bytes, by_parameters)


def _idle(headers: tuple[GGUFHeader, ...]) -> tuple[float, float]:
    """Bytes and parameters of the experts that a token does not need, on average."""
    weights = layer_weights(ModelFiles(headers))
    n_bytes = parameters = 0.0
    for layer in weights.experts:
        share = 1 - weights.n_used / layer.n_experts
        n_bytes += share * layer.n_bytes
        parameters += share * sum(math.prod(tensor.shape) for tensor in layer.tensors)
    return n_bytes, parameters


def _parameters(headers: tuple[GGUFHeader, ...]) -> int:
    return sum(math.prod(tensor.shape) for header in headers for tensor in header.tensors)


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
