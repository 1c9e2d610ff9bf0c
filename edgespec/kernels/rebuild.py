"""The command that rebuilds kernels which do not work on this processor."""

from __future__ import annotations

from edgespec.installation import install_command
from edgespec.kernels.native.build import COMMAND
from edgespec.kernels.setting import OWN


def rebuild_command(layout: str = "") -> str:
    """A shell command that rebuilds llama.cpp, or EdgeSpec's own kernels, so that a layout's kernels work."""
    if layout == OWN:
        return f"{COMMAND} --again"
    # GCC bug 114098: the compiler drops stores that AMX instructions read.
    flags = 'CXXFLAGS="-fno-tree-dse -fno-dse"' if layout == "AMX" else ""
    return install_command(rebuild=True, environment=flags)
