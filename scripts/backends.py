"""What llama.cpp can compute on besides the processor, and whether a build for it is possible here."""

from __future__ import annotations

import os
import shutil
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

_VULKAN_HEADER = "vulkan/vulkan.h"
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


def missing(backend: str, platform: str) -> str:
    """What a build for a backend lacks here, and how to get it; empty if nothing."""
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
    if backend == "vulkan" and not (shutil.which("glslc") and _has_vulkan_headers()):
        return (
            "For Vulkan, llama.cpp is compiled with Vulkan's headers and its shader compiler, glslc.\n"
            "Install them (on Debian and Ubuntu: sudo apt install libvulkan-dev glslc spirv-headers), and "
            "run this again."
        )
    return ""


def _has_vulkan_headers() -> bool:
    folders = [*_INCLUDES]
    if os.environ.get("VULKAN_SDK"):
        folders += [f"{os.environ['VULKAN_SDK']}/include", f"{os.environ['VULKAN_SDK']}/Include"]
    return any((Path(folder) / _VULKAN_HEADER).exists() for folder in folders)
