"""Gathers everything that decides how EdgeSpec runs on a machine, without judging it."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.doctor.devices import DeviceCheck, examine_devices
from edgespec.doctor.kernels import KernelFacts, examine_kernels
from edgespec.errors import BackendError, EdgeSpecError
from edgespec.files.user_folders import cache_folder
from edgespec.machine.disks import Disk, disk_of
from edgespec.machine.probe import Machine, probe
from edgespec.models.gguf.footprint import cells_for
from edgespec.prebuilt import misfit
from edgespec.profiles.store import ProfileStore
from edgespec.progress import Progress, no_progress

if TYPE_CHECKING:
    from edgespec.llama.build import Build
    from edgespec.models.hub.repository import Hub

_WORTH_READING = 64 << 20  # bytes; reading a smaller file would say little about the speed


@dataclass(frozen=True)
class ModelFacts:
    """The model in question.

    Attributes:
        path: its first file; None if it is only on the Hub.
        described: see planning.report.summary.describe.
        drafter, drafter_reason: what `--draft auto` would take; empty if there is nothing.
    """

    name: str
    path: Path | None
    described: dict[str, Any]
    drafter: str = ""
    drafter_reason: str = ""

    @property
    def memory(self) -> dict[str, Any]:
        """The fit into memory; its "verdict" is "fits", "streams" or "too large"."""
        memory: dict[str, Any] = self.described["memory"]
        return memory


@dataclass(frozen=True)
class Facts:
    """A machine, the llama.cpp build, the settings and maybe a model.

    Attributes:
        machine: with the disk of the model; without a model, that of the largest local one, or else of the
            cache.
        cache: the disk of EdgeSpec's cache folder, which has the packed layers.
        build: None if llama.cpp cannot be loaded; `build_problem` says why.
        kernels: the build's kernel layouts.
        devices: graphics cards and others that the build can give layers to.
        wheel_misfit: the reason why an installed wheel of llama.cpp's libraries is not used; empty if it is.
        no_streaming: why weights cannot be streamed here; empty if they can.
        speed: bytes per second read from `speed_file`; None if not measured.
        settings_problem, model_problem: the error of the configuration file or the model.
    """

    machine: Machine
    cache: Disk
    build: Build | None = None
    build_problem: str = ""
    wheel_misfit: str = ""
    kernels: KernelFacts = field(default_factory=KernelFacts)
    devices: tuple[DeviceCheck, ...] = ()
    no_streaming: str = ""
    speed: float | None = None
    speed_file: Path | None = None
    model: ModelFacts | None = None
    model_problem: EdgeSpecError | None = None
    settings_problem: EdgeSpecError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields for scripts, without the problems."""
        from edgespec.version import __version__

        model = self.model
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
            "model": {
                "name": model.name,
                "path": str(model.path) if model.path else None,
                "drafter": model.drafter or None,
                "drafter_reason": model.drafter_reason or None,
                **model.described,
            }
            if model
            else None,
        }


def gather(
    model: str | None = None,
    *,
    measure_disk: bool = True,
    settings_problem: EdgeSpecError | None = None,
    on_progress: Progress = no_progress,
) -> Facts:
    """Gather all facts; takes about two seconds. Failures become facts too."""
    from edgespec.models.hub.repository import Hub

    on_progress("Looking at this machine", 0.0)
    cache = cache_folder()
    machine = probe(cache)
    cache_disk = machine.disk
    hub, store = Hub.without_token(), ProfileStore()
    build, build_problem, no_streaming = _inspect_build()
    on_progress("Trying the processor's kernels", 0.0)
    kernels = examine_kernels() if build is not None else KernelFacts()
    devices = examine_devices(build, store, on_progress) if build is not None else ()
    model_facts: ModelFacts | None = None
    model_problem: EdgeSpecError | None = None
    if model is not None:
        try:
            model_facts = _inspect_model(model, on_progress)
        except EdgeSpecError as error:
            model_problem = error
        except OSError as error:
            model_problem = EdgeSpecError(f"Cannot read model '{model}': {error}.")
    file = model_facts.path if model_facts else None if model else _largest_here(hub)
    if file is not None:
        machine = replace(machine, disk=disk_of(file))
    speed = None
    if measure_disk and build is not None and file is not None and _size(file) >= _WORTH_READING:
        from edgespec.measure.throughput import read_speed

        on_progress("Reading from the disk", 0.0)
        speed = read_speed(file)
    return Facts(
        machine=machine,
        cache=cache_disk,
        build=build,
        build_problem=build_problem,
        wheel_misfit=misfit(),
        kernels=kernels,
        devices=devices,
        no_streaming=no_streaming,
        speed=speed,
        speed_file=file if speed is not None else None,
        model=model_facts,
        model_problem=model_problem,
        settings_problem=settings_problem,
    )


def _inspect_build() -> tuple[Build | None, str, str]:
    """The build, why there is none, and why it cannot stream."""
    try:
        from edgespec.kernels.ggml import UnsupportedBuild
        from edgespec.llama.build import current_build
        from edgespec.offload.support import check_supported

        build = current_build()
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
        BackendError,
    ) as error:  # the library is missing or broken
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__, ""
    try:
        check_supported()
    except UnsupportedBuild as error:
        return build, "", str(error)
    return build, "", ""


def _inspect_model(model: str, on_progress: Progress) -> ModelFacts:
    from edgespec.models.gguf.layers import ModelFiles
    from edgespec.models.hub.inspection import inspect_model
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
    return ModelFacts(
        model,
        inspected.path,
        describe(inspected.headers, memory=memory, approximate=inspected.approximate),
        drafter=str(taken.path) if taken else "",
        drafter_reason=taken.reason if taken else "",
    )


def _largest_here(hub: Hub) -> Path | None:
    """The first file of the largest local model."""
    from edgespec.models.hub.inventory import local_models

    try:
        files = [model.path for model in local_models(hub)]
    except (EdgeSpecError, OSError):
        return None
    return max(files, key=_size, default=None)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
