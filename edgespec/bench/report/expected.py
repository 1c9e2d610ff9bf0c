"""Predictions of the planner for a row, from an earlier profile."""

from __future__ import annotations

from functools import lru_cache

from edgespec.bench.rows.row_spec import AUTO, PLAIN, RowSpec
from edgespec.config import Config
from edgespec.errors import EdgeSpecError
from edgespec.machine.cores import default_threads
from edgespec.planning.report.model_report import plan_for
from edgespec.planning.report.report import PlanReport
from edgespec.progress import no_progress


def expected(spec: RowSpec, temperature: float) -> float | None:
    """Tokens per second; None if the pair was not measured, or the planner has no model of the row."""
    load = spec.load
    if spec.texts or spec.place not in ("memory", "stream") or load.memory.experts == "never":
        return None
    threads = load.devices.threads or default_threads()
    try:
        plan = _plan(load.with_(threads=threads, workers=()), temperature)
    except EdgeSpecError:
        return None
    if plan.uncertain:
        return None
    if spec.tree == PLAIN:
        return plan.plain.tokens_per_second
    if spec.tree == AUTO:
        return plan.chosen.tokens_per_second
    nodes = int(spec.tree)
    return next((size.tokens_per_second for size in plan.sizes if size.nodes == nodes), None)


@lru_cache(maxsize=32)
def _plan(config: Config, temperature: float) -> PlanReport:
    return plan_for(config, no_progress, temperature=temperature)
