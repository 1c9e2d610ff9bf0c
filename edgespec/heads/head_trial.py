"""Vetting a head: a child process loads it with zeros for its weights, and drafts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgespec.base.option import named
from edgespec.errors import BackendError
from edgespec.heads.families import open_context
from edgespec.heads.head import Head
from edgespec.heads.hidden_states import LastStates
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.load_trial import (
    model_with_zeros,
    planned_model,
    read_and_write,
    small_context,
    zeros_work,
)
from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles


def require_draftable(head: Head, files: ModelFiles, target: ModelFiles) -> None:
    """Make sure that llama.cpp can draft with a head, and survives it.

    Args:
        files: the head's own, or the target's where it is layers of the target's file.

    Raises:
        BackendError: this llama.cpp build cannot draft with heads.
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
        trial=__name__,
    )


def support_fault() -> str:
    """The reason why heads do not work here, as a clause; empty if they do."""
    try:
        nextn.check()
    except UnsupportedBuild as error:
        return str(error)
    return ""


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The child's side: draft with the head at "path", beside its target at "beside" if there is one.

    Without a target, layers for multi-token prediction in the file draft. If "head", it has no others.
    """
    start_backend()
    beside = Path(request["beside"]) if "beside" in request else None
    _draft(Path(request["path"]), beside, has_target=not request["head"])
    return {}


def _draft(path: Path, target: Path | None, *, has_target: bool) -> None:
    """Draft a little, or set the contexts up if nothing can be computed without weights.

    Args:
        has_target: whether the file has the target's own layers, too.
    """
    computes = zeros_work()
    opened = model_with_zeros if computes else planned_model
    with ExitStack() as stack:
        model = stack.enter_context(opened(path, mtp=target is None))
        read_and_write(model)
        large = stack.enter_context(opened(target)) if target else model if has_target else None
        shown = None if large is None else small_context(large)
        small = open_context(model, shown if target else None, n_cells=256, n_sequences=1, n_threads=1)
        if computes:
            if shown is not None:
                states = LastStates(shown.model.width)
                states.attach(shown)
                shown.decode(TokenBatch.run([0, 0], 0, n_sequences=1, logits="all"))
                states.rows()
            small.draft_from_zeros(2)
        small.close()
        if shown is not None:
            shown.close()
