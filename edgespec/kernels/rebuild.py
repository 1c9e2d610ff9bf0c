"""The command that rebuilds kernels which do not work on this processor."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp

from edgespec.kernels.native.build import COMMAND
from edgespec.kernels.setting import OWN


def rebuild_command(layout: str = "") -> str:
    """A shell command that rebuilds llama.cpp, or EdgeSpec's own kernels, so that a layout's kernels work."""
    if layout == OWN:
        return f"{COMMAND} --again"
    script = Path(__file__).parents[2] / "scripts" / "setup.py"
    if layout == "AMX" and script.exists():
        return f"python3 {os.path.relpath(script)}"
    # GCC bug 114098: the compiler drops stores that AMX instructions read.
    flags = 'CXXFLAGS="-fno-tree-dse -fno-dse" ' if layout == "AMX" else ""
    return (
        f'{flags}CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --force-reinstall --no-deps --no-cache-dir '
        f"--no-binary llama-cpp-python llama-cpp-python=={llama_cpp.__version__}"
    )
