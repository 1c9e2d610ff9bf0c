"""Gathers everything that decides how EdgeSpec runs on a machine, without judging it."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.base.installation import install_command
from edgespec.base.prebuilt import PACKAGE, misfit
from edgespec.base.progress import Progress, no_progress
from edgespec.config import DevicesConfig
from edgespec.doctor.kernels import KernelFacts, examine_kernels
from edgespec.errors import BackendError, EdgeSpecError, InconclusiveTrial
from edgespec.files.user_folders import cache_folder
from edgespec.machine.disks import Disk, disk_of
from edgespec.machine.probe import Machine, probe
from edgespec.models.gguf.footprint import cells_for
from edgespec.profiles.store import ProfileStore

if TYPE_CHECKING:
    from edgespec.llama.build import Build

_Q4_K = 12  # ggml's number of a quantization that many models have


@dataclass(frozen=True)
class DeviceCheck:
    """The outcome of trying a device."""

    name: str  # for --device
    description: str
    free: int  # bytes of its memory
    total: int
    measured: str = ""  # what it is and how fast, in sentences
    problem: str = ""  # how trying it ended; empty if it works
    untried: str = ""  # why it could not be tried; empty if it was
    faster: bool = False  # products take less time there than on the processor

    @property
    def title(self) -> str:
        """Its name, and what it is."""
        return f"{self.name} ({self.description})" if self.description else self.name

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine_devices(build: Build, store: ProfileStore, on_progress: Progress) -> tuple[DeviceCheck, ...]:
    """Try and measure every device, in a child process; what was measured before is not measured again."""
    if not build.gpus:
        return ()
    from edgespec.kernels.device_speed import DeviceFailed
    from edgespec.machine.cores import default_threads
    from edgespec.planning.devices.finding import PlacementRequest, describe, measured

    request = PlacementRequest(DevicesConfig(), default_threads(), store, on_progress)
    found = []
    for device in build.gpus:
        about = (device.name, device.description, device.free, device.total)
        try:
            card = measured(device, _Q4_K, request)
        except DeviceFailed as error:
            found.append(DeviceCheck(*about, problem=str(error)))
        except InconclusiveTrial as error:
            found.append(DeviceCheck(*about, untried=error.reason))
        else:
            faster = card.seconds[-1] < card.profile.own_seconds[-1]
            placed = "placed automatically" if faster else "slower than the processor: --gpu-layers places"
            text = f"{describe(card)} Layers are {placed}."
            found.append(DeviceCheck(*about, text, faster=faster))
    return tuple(found)


_WORTH_READING = 64 << 20  # bytes; reading a smaller file would say little about the speed


@dataclass(frozen=True)
class Facts:
    """A machine, the llama.cpp build, the settings and maybe a model."""

    machine: Machine  # with the disk of the model, or else of the largest local one, or of the cache
    cache: Disk  # of EdgeSpec's cache folder, which has the packed layers
    build: Build | None = None  # None if llama.cpp cannot be loaded
    wheel_misfit: str = ""  # why an installed wheel of llama.cpp's libraries is not used
    kernels: KernelFacts = field(default_factory=KernelFacts)
    devices: tuple[DeviceCheck, ...] = ()
    no_streaming: str = ""  # why weights cannot be streamed here
    speed: float | None = None  # bytes per second read from `speed_file`; None if not measured
    speed_file: Path | None = None
    # As `planning.report.summary.describe` has it, and its name, path, drafter and why that was chosen.
    model: dict[str, Any] | None = None
    errors: tuple[tuple[str, EdgeSpecError], ...] = ()  # each with what it is about

    def to_json(self) -> dict[str, Any]:
        """Return the fields for scripts, without the errors."""
        from edgespec.version import __version__

        return {
            "edgespec": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "machine": self.machine.to_json(),
            "cache": asdict(self.cache) | {"path": str(self.cache.path)},
            "build": asdict(self.build) if self.build else None,
            "kernels": self.kernels.to_json(),
            "devices": [device.to_json() for device in self.devices],
            "streams": self.build is not None and not self.no_streaming,
            "read_bytes_per_second": self.speed,
            "read_file": str(self.speed_file) if self.speed_file else None,
            "model": self.model,
        }


def gather(
    model: str | None = None,
    *,
    measure_disk: bool = True,
    settings_problem: EdgeSpecError | None = None,
    on_progress: Progress = no_progress,
) -> Facts:
    """Gather all facts; takes about two seconds. Failures become facts too."""
    on_progress("Looking at this machine", 0.0)
    cache = cache_folder()
    machine = probe(cache)
    cache_disk, store = machine.disk, ProfileStore()
    errors = [] if settings_problem is None else [("settings", settings_problem)]
    build: Build | None = None
    no_streaming, kernels = "", KernelFacts()
    devices: tuple[DeviceCheck, ...] = ()
    try:
        build, no_streaming = _inspect_build()
    except BackendError as error:
        errors.append(("llama.cpp", error))
    else:
        on_progress("Trying the processor's kernels", 0.0)
        kernels = examine_kernels()
        devices = examine_devices(build, store, on_progress)
    if kernels.error is not None:
        errors.append(("kernels", kernels.error))
    described: dict[str, Any] | None = None
    if model is not None:
        try:
            described = _inspect_model(model, on_progress)
        except EdgeSpecError as error:
            errors.append(("model", error))
        except OSError as error:
            errors.append(("model", EdgeSpecError(f"Cannot read model '{model}': {error}.")))
    named = described["path"] if described else None
    file = Path(named) if named else None if model else _largest_here()
    if file is not None:
        machine = replace(machine, disk=disk_of(file))
    speed = None
    if measure_disk and build is not None and file is not None and _size(file) >= _WORTH_READING:
        from edgespec.measure.throughput import read_speed

        on_progress("Reading from the disk", 0.0)
        speed = read_speed(file)
    return Facts(
        machine,
        cache_disk,
        build,
        misfit(),
        kernels,
        devices,
        no_streaming,
        speed,
        file if speed is not None else None,
        described,
        tuple(errors),
    )


def _inspect_build() -> tuple[Build, str]:
    """The build, and why it cannot stream.

    Raises:
        BackendError: the library is missing or broken.
    """
    try:
        from edgespec.kernels.ggml import UnsupportedBuild
        from edgespec.llama.build import current_build
        from edgespec.planning.devices.machine import check_supported

        build = current_build()
    except (ImportError, OSError, RuntimeError, AttributeError, BackendError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendError(
            f"llama.cpp cannot be loaded: {why}.",
            f"Install the wheel {PACKAGE}, or compile llama.cpp: {install_command(rebuild=True)}",
        ) from error
    try:
        check_supported()
    except UnsupportedBuild as error:
        return build, str(error)
    return build, ""


def _inspect_model(model: str, on_progress: Progress) -> dict[str, Any]:
    from edgespec.models.gguf.layers import ModelFiles
    from edgespec.models.hub.inspection import drafters_of, inspect_model
    from edgespec.planning.drafter import drafter_to_take
    from edgespec.planning.memory.fit import USUAL_CONTEXT, fit_report
    from edgespec.planning.report.summary import describe

    inspected = inspect_model(model, on_progress)
    memory = fit_report(inspected.headers)
    taken = drafter_to_take(
        ModelFiles.of_headers(inspected.headers),
        budget=memory["available_bytes"],
        n_cells=cells_for(USUAL_CONTEXT),
    )
    return {
        "name": model,
        "path": str(inspected.path) if inspected.path else None,
        "drafter": str(taken.path) if taken else None,
        "drafter_reason": taken.reason if taken else None,
        "drafters": drafters_of(inspected),
        **describe(inspected.headers, memory=memory, approximate=inspected.approximate),
    }


def _largest_here() -> Path | None:
    """The first file of the largest local model."""
    from edgespec.models.hub.inventory import local_models
    from edgespec.models.hub.repository import Hub

    try:
        files = [model.path for model in local_models(Hub.without_token())]
    except (EdgeSpecError, OSError):
        return None
    return max(files, key=_size, default=None)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
