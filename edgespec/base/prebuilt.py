"""The wheel of llama.cpp's libraries (edgespec-llama), and which folder llama-cpp-python loads them from.

llama-cpp-python looks into LLAMA_CPP_LIB_PATH when it is imported, and OpenMP at its own variables when it is
loaded. So `kernels.bindings`, which imports llama-cpp-python, calls `prepare_loading` first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "LLAMA_CPP_LIB_PATH"
PACKAGE = "edgespec-llama"

COMPILED, WHEEL, FOLDER = "compiled", "wheel", "folder"
"""Origins of libraries: compiled with llama-cpp-python, the wheel, or a folder that the variable names."""

_BINDINGS = "llama-cpp-python"

# llama.cpp's threads meet at a barrier a thousand times per pass, where OpenMP lets early threads spin for a
# millisecond. If another program occupies the core of a late thread, both waste their time slices: decoding
# beside a busy program ran at a third or a tenth of its speed. Spinning a thousand times is enough when the
# cores are free, and costs nothing then.
_SPINNING, _SPINS = "GOMP_SPINCOUNT", "1000"


@dataclass(frozen=True)
class Wheel:
    """The wheel, as it is installed."""

    folder: Path  # its libraries
    version: str
    bindings: str  # the version of llama-cpp-python that they fit


@cache
def installed_wheel() -> Wheel | None:
    """The wheel; None if it is not installed."""
    try:
        import edgespec_llama
    except ImportError:
        return None
    return Wheel(edgespec_llama.LIBRARIES, _version(PACKAGE), edgespec_llama.LLAMA_CPP_PYTHON)


def prepare_loading() -> None:
    """Set the variables that llama.cpp's libraries are loaded with, unless a person has set them."""
    os.environ.setdefault(_SPINNING, _SPINS)
    use_wheel()


def use_wheel() -> None:
    """Have llama-cpp-python load the wheel's libraries, if there are any that fit.

    A folder that was chosen by the variable is kept.
    """
    wheel = installed_wheel()
    if wheel is not None and not misfit() and VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(wheel.folder)


def wheel_in_use() -> Wheel | None:
    """The wheel, if its libraries are loaded or would be."""
    use_wheel()
    wheel = installed_wheel()
    return wheel if wheel is not None and os.environ.get(VARIABLE) == str(wheel.folder) else None


@cache
def misfit() -> str:
    """The reason why an installed wheel is not used, as a sentence; empty if it is, or there is none."""
    wheel = installed_wheel()
    if wheel is None:
        return ""
    found = _version(_BINDINGS).partition("+")[0]
    if found == wheel.bindings:
        return ""
    return (
        f"{PACKAGE} {wheel.version} is for {_BINDINGS} {wheel.bindings}, and {found or 'none'} is "
        "installed: its libraries are not used."
    )


def _version(package: str) -> str:
    from importlib import metadata  # takes long to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
