"""Ten checks of a machine for running models: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.doctor.facts import Facts
from edgespec.installation import compile_command, install_command
from edgespec.kernels.setting import cost_of_missing, kernels_of
from edgespec.machine.cores import FEATURES
from edgespec.machine.disks import HDD, NETWORK, NVME, SSD, TMPFS, VIRTUAL
from edgespec.machine.gpus import AMD, INTEL, NVIDIA
from edgespec.prebuilt import PACKAGE
from edgespec.units import readable

OK, HINT, WARNING, ERROR = "ok", "hint", "warning", "error"
SEVERITIES = (OK, HINT, WARNING, ERROR)

_GPU_BUILDS = {NVIDIA: "-DGGML_CUDA=on", AMD: "-DGGML_HIP=on", INTEL: "-DGGML_VULKAN=on"}
_SLOW, _FAST = 200e6, 1e9  # bytes per second: of a spinning disk, and of one that streams well
_LITTLE_MEMORY = 1 << 30
_SPARE_DISK = 1 << 30  # what packing leaves free
_SLOWNESS = {NVME: 0, SSD: 1, VIRTUAL: 1, HDD: 3, NETWORK: 3}  # a larger number is a slower disk
_UNKNOWN_SLOWNESS = 2


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        severity: "ok", "hint" (could be better), "warning" (is slow or may fail) or "error" (fails).
        about: such as "memory".
        what: a sentence.
        do: what to do about it; empty with "ok".
    """

    severity: str
    about: str
    what: str
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for scripts."""
        return asdict(self)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings about the facts, the worst first."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _settings(facts: Facts) -> Iterator[Finding]:
    if facts.settings_problem is not None:
        yield Finding(ERROR, "settings", facts.settings_problem.what, facts.settings_problem.hint)


def _llama_cpp(facts: Facts) -> Iterator[Finding]:
    if facts.build is None:
        yield Finding(
            ERROR,
            "llama.cpp",
            f"llama.cpp cannot be loaded: {facts.build_problem}.",
            f"Install the wheel {PACKAGE}, or compile llama.cpp: {install_command(rebuild=True)}",
        )
    elif facts.wheel_misfit:
        yield Finding(
            WARNING,
            "llama.cpp",
            facts.wheel_misfit,
            "Install wheels that were made together: pip install --force-reinstall --no-deps *.whl",
        )


def _processor(facts: Facts) -> Iterator[Finding]:
    if facts.build is None:
        return
    built = facts.build.features
    has = facts.machine.cores.features
    missing = [name for name in has if name in FEATURES and name not in built]
    if "AVX512_VNNI" in built and "AVX_VNNI" in missing:
        missing.remove("AVX_VNNI")  # the wider one is used instead
    if missing:
        yield Finding(
            WARNING,
            "processor",
            f"llama.cpp was compiled without {', '.join(missing)}, which this processor has: it computes "
            "slower than it could.",
            f"Compile it for this processor: {compile_command('-DGGML_NATIVE=ON -DGGML_RPC=ON')}",
        )
    elif has:
        yield Finding(OK, "processor", "llama.cpp uses all features of this processor.")


def _kernels(facts: Facts) -> Iterator[Finding]:
    kernels = facts.kernels
    if kernels.error is not None:
        yield Finding(ERROR, "kernels", kernels.error.what, kernels.error.hint)
    for layout in kernels.layouts:
        if layout.problem:
            yield Finding(
                WARNING,
                "kernels",
                f"{kernels_of(layout.name)} are not used: {layout.problem}. {cost_of_missing(layout.name)}",
                layout.remedy,
            )
        elif layout.used:
            measured = f": they are {layout.speed_text}" if layout.speed_text else ""
            yield Finding(OK, "kernels", f"{kernels_of(layout.name)} work here{measured}.")
        else:
            yield Finding(
                HINT,
                "kernels",
                f"EDGESPEC_KERNELS={kernels.setting} leaves out {layout.name}.",
                "Unset it to use the fastest working kernels.",
            )


def _streaming(facts: Facts) -> Iterator[Finding]:
    if facts.no_streaming:
        yield Finding(
            WARNING,
            "streaming",
            f"Weights cannot be streamed here: {facts.no_streaming}. The system pages models larger than "
            "memory in and out instead, which is slow.",
            "On Linux and macOS, install the llama-cpp-python that EdgeSpec asks for: pip install edgespec",
        )


def _graphics(facts: Facts) -> Iterator[Finding]:
    if facts.build is None:
        return
    for device in facts.devices:
        name = f"{device.name} ({device.description})" if device.description else device.name
        if device.problem:
            yield Finding(
                WARNING,
                "graphics",
                f"llama.cpp cannot compute on {name}: its trial failed ({device.problem}).",
                "Update the GPU's driver; until then, the GPU is not used.",
            )
        elif device.untried:
            yield Finding(
                WARNING,
                "graphics",
                f"The check of {name} was inconclusive: its process {device.untried}.",
                "Close other programs, and run `edgespec doctor` again.",
            )
        elif device.faster:
            text = f"Layers are placed on {name} automatically, as it is faster. {device.binds}".rstrip()
            yield Finding(OK, "graphics", text)
        else:
            yield Finding(
                OK,
                "graphics",
                f"Layers can be placed on {name} with --gpu-layers. It is slower than the processor.",
            )
    for gpu in () if facts.build.gpus else facts.machine.gpus:
        if gpu.vendor != INTEL:  # one inside the processor reads the same memory
            again = compile_command(_GPU_BUILDS[gpu.vendor])
            yield Finding(
                HINT,
                "graphics",
                f"{gpu.name} is here, and this llama.cpp build computes on the processor alone.",
                f"To place layers on it with --gpu-layers: {again}",
            )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.machine.memory
    if memory.address_space is not None:
        yield Finding(
            WARNING,
            "memory",
            f"This process may use {readable(memory.address_space)} of addresses (ulimit -v), and a streamed "
            "model takes as many as it is large.",
            "Lift it: ulimit -v unlimited",
        )
    if memory.available < _LITTLE_MEMORY:
        yield Finding(
            WARNING,
            "memory",
            f"Only {readable(memory.available)} of memory is free.",
            "Close other programs; then more of a model stays in memory.",
        )


def _disk(facts: Facts) -> Iterator[Finding]:
    disk, speed = facts.machine.disk, facts.speed
    if disk.kind in (HDD, NETWORK):
        what = "is a hard disk" if disk.kind == HDD else "is on the network"
        yield Finding(
            WARNING,
            "disk",
            f"The disk of {disk.path} {what}: every pass of a streamed model waits for it.",
            "Keep models and the cache (XDG_CACHE_HOME) on an SSD.",
        )
    elif speed is not None and speed < _FAST:
        yield Finding(
            WARNING if speed < _SLOW else HINT,
            "disk",
            f"{readable(speed)}/s were read from {disk.path}: a streamed pass takes "
            f"{2**30 / speed:.1f} s for each GiB that does not fit.",
            "A faster disk speeds up every pass; so does a smaller quantization: edgespec plan REPO",
        )
    elif speed is not None:
        yield Finding(OK, "disk", f"The disk is fast enough for streaming: {readable(speed)}/s.")


def _cache(facts: Facts) -> Iterator[Finding]:
    disk, cache, model = facts.machine.disk, facts.cache, facts.model
    if cache.kind == TMPFS:
        yield Finding(
            WARNING,
            "cache",
            f"The cache folder {cache.path} is in memory itself, so packed layers there take up the memory "
            "that they should save.",
            "Set XDG_CACHE_HOME to a folder on an SSD.",
        )
    elif _SLOWNESS.get(cache.kind, _UNKNOWN_SLOWNESS) > _SLOWNESS.get(disk.kind, _UNKNOWN_SLOWNESS):
        yield Finding(
            WARNING,
            "cache",
            f"The cache folder {cache.path} is on a slower disk ({cache.kind}) than the model ({disk.kind}), "
            "and streamed layers are read from there.",
            "Set XDG_CACHE_HOME to a folder on the faster disk, or stream the file itself: --pack never",
        )
    packed = int(model.described["bytes"]) if model and model.memory["verdict"] == "streams" else 0
    if cache.total and cache.free < packed + _SPARE_DISK:
        needed = f", and packed layers of this model take about {readable(packed)}" if packed else ""
        yield Finding(
            WARNING,
            "cache",
            f"{readable(cache.free)} are free on the disk of the cache folder {cache.path}{needed}.",
            "Free some space: edgespec models list, edgespec models remove",
        )


def _model(facts: Facts) -> Iterator[Finding]:
    if facts.model_problem is not None:
        yield Finding(ERROR, "model", facts.model_problem.what, facts.model_problem.hint)
    model = facts.model
    if model is None:
        return
    memory = model.memory
    needed, available = readable(memory["needed_bytes"]), readable(memory["available_bytes"])
    if memory["verdict"] == "too large":
        yield Finding(
            ERROR,
            "model",
            f"{readable(memory['least_bytes'])} of memory is required, but {available} is free.",
            "Close other programs, or use a smaller quantization or model.",
        )
    elif memory["verdict"] == "streams":
        a_pass = memory["streamed_bytes_per_pass"]
        seconds = f", {a_pass / facts.speed:.1f} s at the speed of this disk" if facts.speed else ""
        yield Finding(
            OK,
            "model",
            f"It needs {needed} of memory, and {available} are free: {readable(a_pass)} are read from disk "
            f"in every pass{seconds}.",
        )
    else:
        yield Finding(OK, "model", f"It fits into memory: {needed} of {available}.")
    if not model.drafter:
        yield Finding(
            HINT,
            "drafter",
            "No drafter for this model: drafts come from the text itself.",
            f"edgespec draft make {model.name}",
        )


_CHECKS = (
    _settings,
    _llama_cpp,
    _processor,
    _kernels,
    _streaming,
    _graphics,
    _memory,
    _disk,
    _cache,
    _model,
)
