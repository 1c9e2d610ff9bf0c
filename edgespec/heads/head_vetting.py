"""Making sure that a head can draft here, before it does."""

from __future__ import annotations

from edgespec.errors import BackendError
from edgespec.heads.shared.head import Head
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.option import named

_TRIAL = "edgespec.heads.head_trial"


def require_draftable(head: Head, files: ModelFiles, target: ModelFiles) -> None:
    """Make sure that llama.cpp can draft with a head, and survives it.

    Args:
        files: the head's own, or the target's where it is layers of the target's file.

    Raises:
        BackendError: this llama.cpp build cannot draft with heads.
        ModelFileError: it does not survive loading the head, or drafting with it.
        UsageError: it does not survive drafting with layers of the target.
        InconclusiveTrial: the child process that was to find out was killed, starved or refused memory.
    """
    if fault := support_fault():
        instead = "Name an ordinary drafter" if head.beside_target else f"Leave out {named('draft', 'mtp')}"
        raise BackendError(
            f"This llama.cpp build cannot draft with heads and MTP layers: {fault}.",
            f"{instead}, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )
    require_loadable(
        [read_header(path) for path in files.paths],
        target.headers[0] if head.beside_target else None,
        mtp=not head.beside_target,
        trial=_TRIAL,
    )


def support_fault() -> str:
    """The reason why heads do not work here, as a clause; empty if they do."""
    try:
        nextn.check()
    except UnsupportedBuild as error:
        return str(error)
    return ""
