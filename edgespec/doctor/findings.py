"""What is wrong with a machine for running models, and how to mend it: facts in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.doctor.facts import Facts
from edgespec.machine.cores import FEATURES
from edgespec.machine.disks import HDD, NETWORK, NVME, SSD, TMPFS, VIRTUAL
from edgespec.machine.gpus import AMD, INTEL, NVIDIA
from edgespec.machine.memory import OVERCOMMIT_STRICT
from edgespec.units import readable

OK, HINT, WARNING, ERROR = "ok", "hint", "warning", "error"
SEVERITIES = (OK, HINT, WARNING, ERROR)

_COSTLY = {"AVX2", "FMA", "AVX512", "AVX512_VNNI", "NEON", "DOTPROD", "MATMUL_INT8"}  # to do without
_SLOW, _FAST = 200e6, 1e9  # bytes a second: of a disk that turns, and of one that streams well
_BUSY = 0.4  # share of the cores' time
_LITTLE_MEMORY = 1 << 30
_SPARE_DISK = 1 << 30  # what packing leaves free
_LITTLE_DISK = 4 << 30
_ORDER = {NVME: 0, SSD: 1, VIRTUAL: 1, HDD: 3, NETWORK: 3}  # how slow
_GPU_BUILDS = {NVIDIA: "-DGGML_CUDA=on", AMD: "-DGGML_HIP=on", INTEL: "-DGGML_VULKAN=on"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

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
        """What scripts see."""
        return asdict(self)


def find(facts: Facts) -> list[Finding]:
    """Everything there is to say about the facts, the worst first."""
    found = [finding for look in _LOOKS for finding in look(facts)]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _build(facts: Facts) -> Iterator[Finding]:
    build = facts.build
    if build is None:
        yield Finding(
            ERROR,
            "llama.cpp",
            f"llama.cpp cannot be loaded: {facts.build_problem}.",
            "Install it again: pip install --force-reinstall --no-cache-dir llama-cpp-python",
        )
        return
    has = facts.machine.cores.features
    missing = [name for name in has if name in FEATURES and name not in build.features]
    if "AVX512_VNNI" in build.features and "AVX_VNNI" in missing:
        missing.remove("AVX_VNNI")  # the wider one is used instead
    if missing:
        yield Finding(
            WARNING if _COSTLY.intersection(missing) else HINT,
            "llama.cpp",
            f"The processor has {', '.join(missing)}, and this llama.cpp build does not use "
            f"{'it' if len(missing) == 1 else 'them'}: it computes slower than it could.",
            f"Compile it for this processor: {_compile_again(build.version)}",
        )
    elif has:
        yield Finding(OK, "llama.cpp", "The llama.cpp build uses what this processor has.")
    if facts.no_streaming:
        yield Finding(
            WARNING,
            "streaming",
            f"Weights cannot be streamed here: {facts.no_streaming}. The system pages models larger than "
            "memory in and out instead, which is slow.",
            "On Linux and macOS, install the llama-cpp-python that EdgeSpec asks for: pip install edgespec",
        )
    else:
        yield Finding(OK, "streaming", "Weights can be streamed here.")


def _kernels(facts: Facts) -> Iterator[Finding]:
    kernels = facts.kernels
    if kernels.error is not None:
        yield Finding(ERROR, "kernels", kernels.error.what, kernels.error.hint)
    left_out = []
    for layout in kernels.layouts:
        if layout.problem:
            yield Finding(
                WARNING,
                "kernels",
                f"llama.cpp's {layout.name} kernels are not used: {layout.problem}. Answers are right, but "
                "slower than they could be.",
                layout.remedy,
            )
        elif layout.used:
            measured = f": they are {layout.speed_text}" if layout.speed_text else ""
            yield Finding(OK, "kernels", f"llama.cpp's {layout.name} kernels work here{measured}.")
        else:
            left_out.append(layout.name)
    if left_out:
        yield Finding(
            HINT,
            "kernels",
            f"EDGESPEC_KERNELS={kernels.setting} leaves out {' and '.join(left_out)}.",
            "Unset it, and the fastest kernels that work are used.",
        )


def _compile_again(version: str, arguments: str = "-DGGML_NATIVE=ON") -> str:
    return (
        f'CMAKE_ARGS="{arguments}" pip install --force-reinstall --no-deps --no-cache-dir '
        f"--no-binary llama-cpp-python llama-cpp-python=={version}"
    )


def _graphics(facts: Facts) -> Iterator[Finding]:
    build, gpus = facts.build, facts.machine.gpus
    if build is None:
        return
    if build.gpus:
        names = ", ".join(device.description or device.name for device in build.gpus)
        yield Finding(OK, "graphics", f"Layers can be given to {names}, with --gpu-layers.")
        return
    for gpu in gpus:
        if gpu.vendor != INTEL:  # one inside the processor reads the same memory
            again = _compile_again(build.version, _GPU_BUILDS[gpu.vendor])
            yield Finding(
                HINT,
                "graphics",
                f"{gpu.name} is here, and this llama.cpp build computes on the processor alone.",
                f"To give layers to it with --gpu-layers: {again}",
            )


def _cores(facts: Facts) -> Iterator[Finding]:
    cores, busy = facts.machine.cores, facts.machine.busy
    if cores.quota is not None and cores.quota < cores.allowed:
        yield Finding(
            HINT,
            "processor",
            f"A container limit gives this process the time of {cores.quota:g} of {cores.allowed} cores.",
            "Raise it (docker run --cpus) if the machine can spare more.",
        )
    if busy is not None and busy >= _BUSY:
        yield Finding(
            WARNING,
            "processor",
            f"Other programs keep the processor busy: {busy:.0%} of all cores just now.",
            "Close them, or ask for fewer --threads: a thread that waits for its core holds up the others.",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.machine.memory
    if memory.overcommit == OVERCOMMIT_STRICT:
        left = f" {readable(memory.commit_left)} are left." if memory.commit_left is not None else ""
        yield Finding(
            WARNING,
            "memory",
            "The system gives out no more memory than it has (vm.overcommit_memory is 2), also where "
            f"a program only reserves it.{left}",
            "If loading fails: sudo sysctl vm.overcommit_memory=0",
        )
    if memory.address_space is not None:
        yield Finding(
            WARNING,
            "memory",
            f"This process may use {readable(memory.address_space)} of addresses (ulimit -v), and a streamed "
            "model takes as many as it is large.",
            "Lift it: ulimit -v unlimited",
        )
    if memory.swap_total == 0:
        yield Finding(
            HINT,
            "memory",
            "There is no swap: if memory runs out, the system ends a program, and not always the right one.",
            "Add some, or leave room with --memory.",
        )
    elif memory.swap_used > memory.swap_total / 2:
        yield Finding(
            WARNING,
            "memory",
            f"{readable(memory.swap_used)} of {readable(memory.swap_total)} swap are in use: programs have "
            "taken more memory than there is.",
            "Close some, or take less with --memory.",
        )
    if memory.available < _LITTLE_MEMORY:
        yield Finding(
            WARNING,
            "memory",
            f"Only {readable(memory.available)} of memory are free.",
            "Close other programs; then more of a model stays in memory.",
        )


def _disks(facts: Facts) -> Iterator[Finding]:
    disk, cache = facts.machine.disk, facts.cache
    if disk.kind in (HDD, NETWORK):
        what = "turns" if disk.kind == HDD else "is on the network"
        yield Finding(
            WARNING,
            "disk",
            f"The disk of {disk.path} {what}: every pass of a streamed model waits for it.",
            "Keep models and the cache (XDG_CACHE_HOME) on an SSD.",
        )
    elif facts.speed is not None and facts.speed < _FAST:
        yield Finding(
            WARNING if facts.speed < _SLOW else HINT,
            "disk",
            f"{facts.speed / 1e6:.0f} MB/s were read from {disk.path}: a streamed pass takes "
            f"{1e9 / facts.speed:.1f} s for each GB that does not fit.",
            "A faster disk helps every pass; so does whatever keeps more of the model in memory.",
        )
    elif facts.speed is not None:
        yield Finding(OK, "disk", f"The disk is fast enough to stream from: {facts.speed / 1e9:.1f} GB/s.")
    if disk.direct is False:
        yield Finding(
            HINT,
            "disk",
            f"The file system of {disk.path} ({disk.file_system or 'unknown'}) has no direct reads: weights "
            "go through the page cache, which costs a copy.",
            "ext4, xfs, btrfs and APFS have them.",
        )
    if cache.kind == TMPFS:
        yield Finding(
            WARNING,
            "cache",
            f"The cache folder {cache.path} lies in memory: packed layers there take what they should spare.",
            "Set XDG_CACHE_HOME to a folder on an SSD.",
        )
    elif _ORDER.get(cache.kind, 2) > _ORDER.get(disk.kind, 2):
        yield Finding(
            WARNING,
            "cache",
            f"The cache folder {cache.path} is on a slower disk ({cache.kind}) than the model ({disk.kind}), "
            "and streamed layers are read from there.",
            "Set XDG_CACHE_HOME to a folder on the faster disk, or stream the file itself: --pack never",
        )
    wanted = _packed(facts) + _SPARE_DISK
    if cache.total and cache.free < _LITTLE_DISK:
        yield Finding(
            WARNING,
            "cache",
            f"{readable(cache.free)} are free on the disk of the cache folder {cache.path}.",
            "Free some: edgespec models list, edgespec models remove",
        )
    elif cache.total and cache.free < wanted:
        yield Finding(
            HINT,
            "cache",
            f"Packed layers of this model would take about {readable(_packed(facts))}, and "
            f"{readable(cache.free)} are free in {cache.path}: the model file is streamed itself, slower.",
            "Free some space, or set XDG_CACHE_HOME to a folder on another disk.",
        )


def _packed(facts: Facts) -> int:
    """Bytes of the packed file that loading the model would make."""
    model = facts.model
    return int(model.described["bytes"]) if model and model.memory["verdict"] == "streams" else 0


def _power(facts: Facts) -> Iterator[Finding]:
    power = facts.machine.power
    if power.saving:
        yield Finding(
            WARNING,
            "power",
            f"Power is being saved: {power.saving}.",
            "Choose the balanced or performance profile: powerprofilesctl set performance"
            if power.profile
            else "sudo cpupower frequency-set -g performance",
        )
    if power.on_battery:
        charge = f", {power.charge:.0%} full" if power.charge is not None else ""
        yield Finding(
            HINT,
            "power",
            f"It runs on battery{charge}" + (", with the lid closed." if power.lid_closed else "."),
            "Plug it in: most laptops compute faster then.",
        )


def _surroundings(facts: Facts) -> Iterator[Finding]:
    if facts.settings_problem is not None:
        problem = facts.settings_problem
        yield Finding(ERROR, "settings", problem.what, problem.hint)
    if facts.offline:
        yield Finding(
            HINT,
            "hub",
            "HF_HUB_OFFLINE is set: models that are not here are not fetched.",
            "Unset it to pull models.",
        )
    if facts.token:
        yield Finding(OK, "hub", f"A token of the Hub is there; it is sent to {facts.endpoint} alone.")
    if not facts.compiler:
        yield Finding(
            HINT,
            "compiler",
            "There is no C++ compiler. It is needed only to install llama.cpp anew.",
            "On Debian and Ubuntu: sudo apt install build-essential",
        )


def _model(facts: Facts) -> Iterator[Finding]:
    if facts.model_problem is not None:
        problem = facts.model_problem
        yield Finding(ERROR, "model", problem.what, problem.hint)
    model = facts.model
    if model is None:
        return
    memory = model.memory
    needed, available = readable(memory["needed_bytes"]), readable(memory["available_bytes"])
    if memory["verdict"] == "too large":
        yield Finding(
            ERROR,
            "model",
            f"{readable(memory['least_bytes'])} of memory are needed at the least, and {available} are free.",
            "Close other programs, or take a smaller quantization or a smaller model.",
        )
    elif memory["verdict"] == "streams":
        a_pass = memory["streamed_bytes_per_pass"]
        seconds = f", {a_pass / facts.speed:.1f} s at the speed of this disk" if facts.speed else ""
        yield Finding(
            WARNING if facts.no_streaming else OK,
            "model",
            f"It needs {needed} of memory, and {available} are free: {readable(a_pass)} are read from disk "
            f"in every pass{seconds}. Drafting makes each pass yield several tokens.",
            "See what is said about streaming." if facts.no_streaming else "",
        )
    else:
        yield Finding(OK, "model", f"It fits into memory: {needed} of {available}.")
    if not model.drafter:
        yield Finding(
            HINT,
            "drafter",
            "No drafter is known for this model: it is drafted for from the text itself.",
            f"edgespec draft make {model.name}",
        )
    if model.path is not None and not model.profiled:
        yield Finding(
            HINT,
            "profile",
            "This model was not measured on this machine with care yet: its first trees are sized by a quick "
            "look.",
            f"edgespec profile {model.name}",
        )


_LOOKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(_model, _surroundings, _build, _kernels, _graphics),
    *(_memory, _disks, _cores, _power),
)
