"""List what llama.cpp can compute on besides the processor, and what a build for it needs here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

AUTO = "auto"
_OFF = "-DGGML_CUDA=OFF -DGGML_HIP=OFF -DGGML_METAL=OFF -DGGML_VULKAN=OFF"
ARGUMENTS = {
    "cpu": _OFF,
    "cuda": "-DGGML_CUDA=ON",
    "rocm": "-DGGML_HIP=ON",
    "metal": "-DGGML_METAL=ON",
    "vulkan": "-DGGML_VULKAN=ON",
}
"""CMake's arguments, by the backend."""

_CORE_MINUTES = {"cuda": 60}
"""What a core of a usual processor takes to compile a backend for one kind of card, measured."""

_VULKAN_HEADER = "vulkan/vulkan_core.h"
_NEWEST_VULKAN = "VK_EXT_layer_settings"  # of what llama.cpp uses; in the headers since version 1.3.272
_INCLUDES = ("/usr/include", "/usr/local/include")


def found(platform: str, devices: Path = Path("/dev")) -> str | None:
    """The backend of a graphics card that is here, if llama.cpp can be compiled for it.

    Metal is not named: llama.cpp takes it by itself on a Mac.

    Args:
        devices: where the system lists them.
    """
    if platform == "darwin":
        return None
    if shutil.which("nvidia-smi") and not missing("cuda", platform):
        return "cuda"
    if (devices / "kfd").exists() and not missing("rocm", platform):
        return "rocm"
    if any(devices.glob("dri/renderD*")) and not missing("vulkan", platform):
        return "vulkan"
    return None


def arguments(backend: str) -> str:
    """CMake's arguments for a backend, for the cards of this machine alone where that can be told."""
    given = ARGUMENTS[backend]
    capabilities = cuda_capabilities() if backend == "cuda" else []
    # Several kinds take a list, whose separator CMAKE_ARGS cannot hold; CMake then looks at the cards itself.
    return f"{given} -DCMAKE_CUDA_ARCHITECTURES={capabilities[0]}-real" if len(capabilities) == 1 else given


def cuda_capabilities() -> list[str]:
    """The kinds of NVIDIA's cards here, by CUDA's numbers, such as "89"; empty if they are not known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = {line.strip().replace(".", "") for line in said.splitlines()}
    return sorted(number for number in found if number.isdigit())


def minutes(backend: str) -> int | None:
    """About how long compiling a backend takes with all cores; None if that is not known."""
    if backend not in _CORE_MINUTES:
        return None
    return max(-(-_CORE_MINUTES[backend] // (os.cpu_count() or 1)), 1)


def missing(backend: str, platform: str) -> str:
    """Missing requirements of a build for a backend, and how to get them; empty if nothing."""
    if backend == "metal" and platform != "darwin":
        return "Metal is for Macs.\nLeave out --backend, or name another one."
    if backend == "cuda" and not shutil.which("nvcc") and not os.environ.get("CUDACXX"):
        return (
            "For CUDA, llama.cpp is compiled with NVIDIA's toolkit, and there is no nvcc on the path.\n"
            "Install it (on Debian and Ubuntu: sudo apt install nvidia-cuda-toolkit), and run this "
            "again with --backend cuda."
        )
    if backend == "rocm" and not shutil.which("hipcc"):
        return (
            "For ROCm, llama.cpp is compiled with AMD's compiler, and there is no hipcc on the path.\n"
            "Install it (on Debian and Ubuntu: sudo apt install hipcc libhipblas-dev), and run this again."
        )
    if backend == "vulkan":
        return _missing_for_vulkan()
    return ""


def _missing_for_vulkan() -> str:
    header = _vulkan_header()
    if not shutil.which("glslc") or header is None:
        return (
            "For Vulkan, llama.cpp is compiled with Vulkan's headers and its shader compiler, glslc.\n"
            "Install them (on Debian and Ubuntu: sudo apt install libvulkan-dev glslc spirv-headers), and "
            "run this again."
        )
    if _NEWEST_VULKAN not in header.read_text("utf-8", "replace"):
        return (
            f"For Vulkan, llama.cpp needs Vulkan's headers from version 1.3.272 on, and {header} is older.\n"
            "Get newer ones (from vulkan.lunarg.com, or the folder 'include' of github.com/KhronosGroup/"
            "Vulkan-Headers), set VULKAN_SDK to the folder that contains 'include', and run this again."
        )
    return ""


def _vulkan_header() -> Path | None:
    """The header that CMake will find; None if there is none."""
    folders = [*_INCLUDES]
    if os.environ.get("VULKAN_SDK"):
        folders = [f"{os.environ['VULKAN_SDK']}/include", f"{os.environ['VULKAN_SDK']}/Include", *folders]
    headers = [Path(folder) / _VULKAN_HEADER for folder in folders]
    return next((header for header in headers if header.exists()), None)
