"""Kernels that are not used on this processor: why, and the command that rebuilds them."""

from __future__ import annotations

from edgespec.installation import install_command
from edgespec.kernels.native import library
from edgespec.kernels.native.build import COMMAND, known_failure, library_path
from edgespec.kernels.setting import OWN


def rebuild_command(layout: str = "") -> str:
    """A shell command that rebuilds llama.cpp, or EdgeSpec's own kernels, so that a layout's kernels work."""
    if layout == OWN:
        return f"{COMMAND} --again"
    # GCC bug 114098: the compiler drops stores that AMX instructions read.
    flags = 'CXXFLAGS="-fno-tree-dse -fno-dse"' if layout == "AMX" else ""
    return install_command(rebuild=True, environment=flags)


def own_fault(faulty: str) -> tuple[str, str]:
    """Why EdgeSpec's own kernels are not used, as a clause, and what to do about it.

    Args:
        faulty: what was found wrong when they were tried; empty if nothing was.

    Returns:
        An empty remedy means that they cannot be had on this machine. Both are empty if nothing is wrong.
    """
    if faulty:
        return faulty, f"To fix it: {rebuild_command(OWN)}"
    if (failure := known_failure()) is not None:
        return str(failure).splitlines()[0].rstrip(":"), failure.remedy
    if library_path() is None:
        return "they were not compiled yet", f"The next start of a model compiles them; so does: {COMMAND}"
    return library.problem(), ""
