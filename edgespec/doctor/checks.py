"""Checks of a machine for running models: facts in, and what a person should change out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.base.installation import compile_command
from edgespec.base.units import readable
from edgespec.doctor.facts import Facts
from edgespec.kernels.setting import cost_of_missing, kernels_of
from edgespec.machine.disks import HDD, NETWORK, NVME, SSD, TMPFS, VIRTUAL
from edgespec.machine.gpus import AMD, INTEL, NVIDIA

HINT, WARNING, ERROR = "hint", "warning", "error"
SEVERITIES = (HINT, WARNING, ERROR)

_GPU_BUILDS = {NVIDIA: "-DGGML_CUDA=on", AMD: "-DGGML_HIP=on", INTEL: "-DGGML_VULKAN=on"}
_SLOW, _FAST = 200e6, 1e9  # bytes per second: of a spinning disk, and of one that streams well
_LITTLE_MEMORY = 1 << 30
_SPARE_DISK = 1 << 30  # what packing leaves free
_SLOWNESS = {NVME: 0, SSD: 1, VIRTUAL: 1, HDD: 3, NETWORK: 3}  # a larger number is a slower disk
_UNKNOWN_SLOWNESS = 2


@dataclass(frozen=True)
class Finding:
    """Something to change: what is wrong, in a sentence, and what to do about it."""

    severity: str  # "hint" (could be better), "warning" (is slow or may fail) or "error" (fails)
    about: str
    what: str
    do: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings about the facts, the worst first."""
    found = [Finding(ERROR, about, error.what, error.hint) for about, error in facts.errors]
    for check in (_llama_cpp, _kernels, _graphics, _memory, _disk, _cache, _model):
        found += check(facts)
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _llama_cpp(facts: Facts) -> Iterator[Finding]:
    if facts.wheel_misfit:
        again = "Install wheels that were made together: pip install --force-reinstall --no-deps *.whl"
        yield Finding(WARNING, "llama.cpp", facts.wheel_misfit, again)
    if facts.no_streaming:
        yield Finding(
            WARNING,
            "streaming",
            f"Weights cannot be streamed here: {facts.no_streaming}. The system pages models larger than "
            "memory in and out instead, which is slow.",
            "On Linux and macOS, compile EdgeSpec's own library (see kernels), and install the "
            "llama-cpp-python that EdgeSpec asks for: pip install edgespec",
        )
    if facts.build is None:
        return
    built, has = facts.build.features, facts.machine.cores.features
    # EdgeSpec's own kernels are faster than llama.cpp's for AMX; AVX512_VNNI is used in place of AVX_VNNI.
    needless = {"AMX_INT8", *(["AVX_VNNI"] if "AVX512_VNNI" in built else [])}
    if missing := [name for name in has if name not in built and name not in needless]:
        yield Finding(
            WARNING,
            "processor",
            f"llama.cpp was compiled without {', '.join(missing)}, which this processor has: it computes "
            "slower than it could.",
            f"Compile it for this processor: {compile_command('-DGGML_NATIVE=ON -DGGML_RPC=ON')}",
        )


def _kernels(facts: Facts) -> Iterator[Finding]:
    for layout in facts.kernels.layouts:
        if layout.problem:
            what = f"{kernels_of(layout.name)} are not used: {layout.problem}. {cost_of_missing(layout.name)}"
            yield Finding(WARNING, "kernels", what, layout.remedy)
        elif not layout.used:
            what = f"EDGESPEC_KERNELS={facts.kernels.setting} leaves out {layout.name}."
            yield Finding(HINT, "kernels", what, "Unset it to use the fastest working kernels.")


def _graphics(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        if device.problem:
            what = f"llama.cpp cannot compute on {device.title}: its trial failed ({device.problem})."
            do = "Update the GPU's driver; until then, the GPU is not used."
            yield Finding(WARNING, "graphics", what, do)
        elif device.untried:
            what = f"The check of {device.title} was inconclusive: its process {device.untried}."
            yield Finding(WARNING, "graphics", what, "Close other programs, and run `edgespec doctor` again.")
    if facts.build is None or facts.build.gpus:
        return
    for gpu in facts.machine.gpus:
        if gpu.vendor != INTEL:  # one inside the processor reads the same memory
            what = f"{gpu.name} is here, and this llama.cpp build computes on the processor alone."
            again = compile_command(_GPU_BUILDS[gpu.vendor])
            yield Finding(HINT, "graphics", what, f"To place layers on it with --gpu-layers: {again}")


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
        what = f"Only {readable(memory.available)} of memory is free."
        do = "Close other programs; then more of a model stays in memory."
        yield Finding(WARNING, "memory", what, do)


def _disk(facts: Facts) -> Iterator[Finding]:
    disk, speed = facts.machine.disk, facts.speed
    if disk.kind in (HDD, NETWORK):
        where = "is a hard disk" if disk.kind == HDD else "is on the network"
        what = f"The disk of {disk.path} {where}: every pass of a streamed model waits for it."
        yield Finding(WARNING, "disk", what, "Keep models and the cache (XDG_CACHE_HOME) on an SSD.")
    elif speed is not None and speed < _FAST:
        yield Finding(
            WARNING if speed < _SLOW else HINT,
            "disk",
            f"{readable(speed)}/s were read from {disk.path}: a streamed pass takes "
            f"{2**30 / speed:.1f} s for each GiB that does not fit.",
            "A faster disk speeds up every pass; so does a smaller quantization: edgespec plan REPO",
        )


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
    packed = int(model["bytes"]) if model and model["memory"]["verdict"] == "streams" else 0
    if cache.total and cache.free < packed + _SPARE_DISK:
        needed = f", and packed layers of this model take about {readable(packed)}" if packed else ""
        what = f"{readable(cache.free)} are free on the disk of the cache folder {cache.path}{needed}."
        do = "Free some space: edgespec models list, edgespec models remove"
        yield Finding(WARNING, "cache", what, do)


def _model(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is None:
        return
    memory = model["memory"]
    if memory["verdict"] == "too large":
        least, available = readable(memory["least_bytes"]), readable(memory["available_bytes"])
        what = f"{least} of memory is required, but {available} is free."
        yield Finding(ERROR, "model", what, "Close other programs, or use a smaller quantization or model.")
    if not model["drafter"]:
        what = "No drafter is chosen for this model: drafts come from the text itself."
        possible = [f"{drafter['name']}: {drafter['why']}" for drafter in model["drafters"]]
        yield Finding(HINT, "drafter", what, next(iter(possible), f"edgespec draft make {model['name']}"))
