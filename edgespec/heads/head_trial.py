"""The child's part of vetting a head: load it with zeros for its weights, and draft.

Run by `processes.trial` for `head_vetting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgespec.heads.opening import open_context
from edgespec.heads.shared.last_states import LastStates
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.trials.zero_weights import (
    model_with_zeros,
    planned_model,
    read_and_write,
    small_context,
    zeros_work,
)

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Do what drafting with the head at "path" does, beside its target at "beside" if there is one.

    Without a target, layers for multi-token prediction in the file draft. If "head", it has no others.

    Raises:
        EdgeSpecError: llama.cpp refused the file.
    """
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
