"""A remedy for compilers that get Intel's matrix units (AMX) wrong; tile_config.h says what is wrong.

The header is put in front of every C++ file of llama.cpp. It changes nothing where the compiler does not
compile for such a processor, and is right with any compiler that knows GCC's options.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

HEADER = Path(__file__).resolve().with_suffix(".h")
CPU_INFO = Path("/proc/cpuinfo")


def applies() -> bool:
    """Whether ggml has AMX kernels on such a system, compiled by GCC, Clang or one of their kin."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def matters(cpu_info: Path = CPU_INFO) -> bool:
    """Whether this processor has the units, so that a build without the remedy may crash."""
    if not applies():
        return False
    try:
        lines = cpu_info.read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    return any(re.match(r"flags\s*:.*\bamx_int8\b", line) for line in lines)


def digest() -> str:
    """Changes when the remedy does."""
    return hashlib.sha256(HEADER.read_bytes()).hexdigest()


def compiling(variables: Mapping[str, str]) -> dict[str, str]:
    """CMAKE_ARGS and CXXFLAGS for a build with the remedy, which keep what `variables` has of them."""
    if not applies():
        return {}
    option = f"-include {shlex.quote(str(HEADER))}"
    arguments = shlex.split(variables.get("CMAKE_ARGS", ""))
    # CMake looks at CXXFLAGS only where it was not told CMAKE_CXX_FLAGS.
    told = re.compile(r"(-D)?CMAKE_CXX_FLAGS(:\w+)?=")
    amended = [f"{a} {option}" if told.match(a) else a for a in arguments]
    return {
        "CMAKE_ARGS": shlex.join(amended),
        "CXXFLAGS": f"{variables.get('CXXFLAGS', '')} {option}".strip(),
    }
