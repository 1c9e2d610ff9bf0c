"""Faults of the software around a model: the llama.cpp build, its kernels, settings and the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgespec.doctor.facts import Facts
from edgespec.doctor.finding import ERROR, HINT, OK, WARNING, Finding
from edgespec.installation import compile_command, install_command
from edgespec.kernels.setting import OWN, cost_of_missing, kernels_of
from edgespec.machine.cores import FEATURES
from edgespec.machine.gpus import AMD, INTEL, NVIDIA
from edgespec.prebuilt import FOLDER, PACKAGE, VARIABLE, WHEEL

if TYPE_CHECKING:
    from edgespec.llama.build import Build

# Features whose absence costs much speed.
_COSTLY = {"AVX2", "FMA", "AVX512", "AVX512_VNNI", "NEON", "DOTPROD", "MATMUL_INT8"}
_GPU_BUILDS = {NVIDIA: "-DGGML_CUDA=on", AMD: "-DGGML_HIP=on", INTEL: "-DGGML_VULKAN=on"}


def _surroundings(facts: Facts) -> Iterator[Finding]:
    if facts.settings_problem is not None:
        problem = facts.settings_problem
        yield Finding(ERROR, "settings", problem.what, problem.hint)
    if facts.offline:
        yield Finding(
            HINT,
            "hub",
            "HF_HUB_OFFLINE is set: models are not downloaded.",
            "Unset it to download models.",
        )
    if facts.token:
        yield Finding(OK, "hub", f"A Hub token is set; it is sent to {facts.endpoint} only.")


def _compiler(facts: Facts) -> Iterator[Finding]:
    """Report a missing compiler, as a fault only where something here would be compiled."""
    if facts.compiler:
        return
    build = facts.build
    from_wheel = build is not None and build.origin == WHEEL
    own_kernels_fail = any(layout.name == OWN and layout.problem for layout in facts.kernels.layouts)
    if from_wheel and not own_kernels_fail:
        yield Finding(OK, "compiler", f"There is no C++ compiler, and the wheel {PACKAGE} needs none.")
    else:
        yield Finding(
            HINT,
            "compiler",
            "There is no C++ compiler. EdgeSpec's own kernels are compiled with one, and so is llama.cpp "
            "when it is installed again.",
            "On Debian and Ubuntu: sudo apt install build-essential",
        )


def _build(facts: Facts) -> Iterator[Finding]:
    build = facts.build
    if build is None:
        yield Finding(
            ERROR,
            "llama.cpp",
            f"llama.cpp cannot be loaded: {facts.build_problem}.",
            f"Install the wheel {PACKAGE}, or compile llama.cpp: {install_command(rebuild=True)}",
        )
        return
    yield from _origin(facts, build)
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
            f"Compile it for this processor: {compile_command('-DGGML_NATIVE=ON -DGGML_RPC=ON')}",
        )
    elif has:
        yield Finding(OK, "llama.cpp", "llama.cpp uses all features of this processor.")
    if facts.no_streaming:
        yield Finding(
            WARNING,
            "streaming",
            f"Weights cannot be streamed here: {facts.no_streaming}. The system pages models larger than "
            "memory in and out instead, which is slow.",
            "On Linux and macOS, install the llama-cpp-python that EdgeSpec asks for: pip install edgespec",
        )
    else:
        yield Finding(OK, "streaming", "Weight streaming works.")
    yield from _heads(facts)


def _origin(facts: Facts, build: Build) -> Iterator[Finding]:
    """Report which libraries of llama.cpp are loaded."""
    if facts.wheel_misfit:
        yield Finding(
            WARNING,
            "llama.cpp",
            facts.wheel_misfit,
            "Install wheels that were made together: pip install --force-reinstall --no-deps *.whl",
        )
    chosen = f" Its kernels for {build.variant} suit this processor best." if build.variant else ""
    if build.origin == WHEEL:
        yield Finding(OK, "llama.cpp", f"llama.cpp comes from the wheel {PACKAGE} {build.wheel}.{chosen}")
    elif build.origin == FOLDER:
        yield Finding(OK, "llama.cpp", f"{VARIABLE} has llama.cpp loaded from {build.libraries}.{chosen}")
    else:
        yield Finding(OK, "llama.cpp", "llama.cpp was compiled when it was installed.")


def _heads(facts: Facts) -> Iterator[Finding]:
    """Report whether the build can draft with heads."""
    if facts.head_fault:
        yield Finding(
            WARNING,
            "heads",
            f"Draft heads and MTP layers do not work here: {facts.head_fault}. Ordinary drafters do.",
            "Install the llama-cpp-python that EdgeSpec asks for: pip install edgespec",
        )
    else:
        yield Finding(
            OK,
            "heads",
            "Draft heads (EAGLE-3, DFlash, DFlash2), MTP layers and Gemma 4's assistants can draft. "
            "Each file is tried before its first use.",
        )


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
                f"{kernels_of(layout.name)} are not used: {layout.problem}. {cost_of_missing(layout.name)}",
                layout.remedy,
            )
        elif layout.used:
            measured = f": they are {layout.speed_text}" if layout.speed_text else ""
            yield Finding(OK, "kernels", f"{kernels_of(layout.name)} work here{measured}.")
        else:
            left_out.append(layout.name)
    if left_out:
        yield Finding(
            HINT,
            "kernels",
            f"EDGESPEC_KERNELS={kernels.setting} leaves out {' and '.join(left_out)}.",
            "Unset it to use the fastest working kernels.",
        )


def _graphics(facts: Facts) -> Iterator[Finding]:
    build, gpus = facts.build, facts.machine.gpus
    if build is None:
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
    if build.gpus:
        return
    for gpu in gpus:
        if gpu.vendor != INTEL:  # one inside the processor reads the same memory
            again = compile_command(_GPU_BUILDS[gpu.vendor])
            yield Finding(
                HINT,
                "graphics",
                f"{gpu.name} is here, and this llama.cpp build computes on the processor alone.",
                f"To place layers on it with --gpu-layers: {again}",
            )


SOFTWARE_CHECKS = (_surroundings, _compiler, _build, _kernels, _graphics)
