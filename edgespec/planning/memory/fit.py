"""The fit of a model into this machine's memory, for `models show` and `doctor`, planned as in loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from edgespec.config import Config, ModelConfig
from edgespec.errors import MemoryLimitError
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.footprint import USUAL_NODES, cells_for
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.planning.memory.budget import least_budget, plan_memory
from edgespec.planning.memory.needs import ContextShape, PairSizes

USUAL_CONTEXT = ModelConfig().context

Verdict = Literal["fits", "streams", "too large"]


def fit_report(
    headers: Sequence[GGUFHeader], *, budget: int | None = None, context: int = USUAL_CONTEXT
) -> dict[str, Any]:
    """The places of the weights of a model without a drafter, as JSON.

    Args:
        headers: of all its files, in order.
        budget: bytes of memory that may be used; None is what is available here.
        context: most tokens of a text.
    """
    room = FreeMemory.read().budget() if budget is None else budget
    files, config = ModelFiles.of_headers(headers), Config.of(context=context)
    sizes = PairSizes(files, None, ContextShape(cells_for(context)), measured=False)
    needs = sizes.at(USUAL_NODES)
    try:
        plan = plan_memory(needs, files, room, config)
    except MemoryLimitError:
        plan = None
    if plan is not None and plan.paged:
        plan = None  # it has no layers that could be streamed
    holding = None if plan is None else plan.holding
    verdict: Verdict = "too large" if holding is None else "streams" if holding.streamed_bytes else "fits"
    return {
        "available_bytes": room,
        "needed_bytes": needs.total,
        "context": context,
        "verdict": verdict,
        "resident_bytes": holding.resident_bytes if holding else 0,
        "streamed_bytes_per_pass": holding.streamed_bytes if holding else 0,
        "least_bytes": least_budget(needs, files, config),
    }
