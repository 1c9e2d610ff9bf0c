"""Fixes for what compilers and llama.cpp get wrong on some processors; build_fixes.h says what that is.

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

# Matrix units, on which a build without the fixes may crash, and arithmetic in half precision, with which its
# attention takes several times as long.
_CONCERNED = {"amx_int8", "avx512_fp16"}


def applies() -> bool:
    """True if ggml has the faulty kernels on such a system, compiled by GCC, Clang or one of their kin."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def are_needed(cpu_info: Path = CPU_INFO) -> bool:
    """True if a build without the fixes does not suit this processor."""
    if not applies():
        return False
    try:
        lines = cpu_info.read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    return any(re.match(r"flags\s*:", line) and not _CONCERNED.isdisjoint(line.split()) for line in lines)


def digest() -> str:
    """Changes when the fixes do."""
    return hashlib.sha256(HEADER.read_bytes()).hexdigest()


def with_fixes(variables: Mapping[str, str]) -> dict[str, str]:
    """CMAKE_ARGS and CXXFLAGS for a build with the fixes, which keep what `variables` has of them."""
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
