"""Whether and how a model fits this machine, for `models show` and `doctor`, computed as in loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from edgespec.errors import MemoryLimitError
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.footprint import SPARE_CELLS, USUAL_NODES, footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.offload.planning.budget import bytes_needed, predict_memory

USUAL_CONTEXT = 4096  # tokens, the default

Verdict = Literal["fits", "streams", "too large"]


def fit_report(
    headers: Sequence[GGUFHeader], *, budget: int | None = None, context: int = USUAL_CONTEXT
) -> dict[str, Any]:
    """How a model without a drafter would be held, as JSON.

    Args:
        headers: of all its files, in order.
        budget: bytes of memory that may be used; None is what is available here.
        context: most tokens of a text.
    """
    room = FreeMemory.read().budget() if budget is None else budget
    files = ModelFiles(tuple(headers))
    needs = footprint(headers[0], n_cells=context + SPARE_CELLS, n_outputs=USUAL_NODES)
    needs = replace(needs, weights=files.tensor_bytes)

    least = needed = bytes_needed([needs])
    try:
        predict_memory([needs], files, 0)
    except MemoryLimitError as error:
        least = error.least or needed
    try:
        plan = predict_memory([needs], files, room)
    except MemoryLimitError:
        plan = None
    if plan is not None and not plan.streamed_bytes and room < needed:
        plan = None  # it has no layers that could be streamed
    verdict: Verdict = "too large" if plan is None else "streams" if plan.streamed_bytes else "fits"
    return {
        "available_bytes": room,
        "needed_bytes": needed,
        "context": context,
        "verdict": verdict,
        "resident_bytes": plan.resident_bytes if plan else 0,
        "streamed_bytes_per_pass": plan.streamed_bytes if plan else 0,
        "least_bytes": least,
    }
