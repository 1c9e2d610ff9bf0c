"""What the planner expects of a row, from a profile that was taken before."""

from __future__ import annotations

from functools import lru_cache

from edgespec.bench.rows.setting import AUTO, PLAIN, Setting
from edgespec.costs.planner import best
from edgespec.errors import EdgeSpecError
from edgespec.machine.cores import default_threads
from edgespec.plans.model_plan import plan_for
from edgespec.plans.plan import Plan, PlanRequest

_CONTEXT = 4096  # as when loading


def expected(setting: Setting, temperature: float) -> float | None:
    """Tokens per second; None where the pair was not measured, or this way to run it is not planned for."""
    if setting.place not in ("memory", "stream"):
        return None
    load = setting.load
    draft = "none" if setting.tree == PLAIN else str(load.get("draft", "auto"))
    try:
        plan = _plan(
            PlanRequest(
                model=str(load["model"]),
                draft=draft,
                memory=load.get("memory"),
                context=load.get("context") or _CONTEXT,
                threads=load.get("threads") or default_threads(),
                temperature=temperature,
                streams=setting.place == "stream",
            )
        )
    except EdgeSpecError:
        return None
    if plan.uncertain:
        return None
    if setting.tree == PLAIN:
        return plan.plain.tokens_per_second
    drafted = [size for size in plan.sizes if size.drafter == plan.drafter or size.nodes == 1]
    if setting.tree == AUTO:
        return best(drafted).tokens_per_second
    nodes = int(setting.tree)
    return next((size.tokens_per_second for size in drafted if size.nodes == nodes), None)


@lru_cache(maxsize=32)
def _plan(wish: PlanRequest) -> Plan:
    return plan_for(wish, lambda _what, _fraction: None)
