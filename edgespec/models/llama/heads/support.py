"""Support for draft heads in this llama.cpp build."""

from __future__ import annotations

from edgespec.errors import BackendError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.models.llama.heads import nextn


def require_support(instead: str) -> None:
    """Make sure that heads of all families work here.

    Args:
        instead: what to do without them, as the beginning of a sentence.

    Raises:
        BackendError: they do not, with the reason.
    """
    if fault := support_fault():
        raise BackendError(
            f"This llama.cpp build cannot draft with heads and MTP layers: {fault}.",
            f"{instead}, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )


def support_fault() -> str:
    """The reason why heads do not work here, as a clause; empty if they do."""
    try:
        nextn.check()
    except UnsupportedBuild as error:
        return str(error)
    return ""
