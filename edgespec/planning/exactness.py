"""Exact decoding under a plan: the row rules that a load tries, and the sizes of trees that follow."""

from __future__ import annotations

from edgespec.llama.row_rule import FREE, FREE_SPARING, MAX_PADDED_ROWS, SPARING, THOROUGH, Search
from edgespec.planning.plan import Plan

_EXPERT_NODES = 8  # every node needs experts of its own, so that larger trees lose


def rule_searches(plan: Plan) -> tuple[Search, ...]:
    """The searches for a row rule that are made for exact decoding, in order; empty if it was declined.

    Own kernels compute alike with any number of rows. In memory, that makes decoding exact for nothing, so
    they are tried even where exactness was not asked for.
    """
    if plan.exact:
        slow = plan.memory.layout is not None or plan.machine.workers is not None
        searches = (FREE_SPARING, SPARING) if slow else (FREE, THOROUGH)
        return searches if plan.alone else searches[1:]
    declined = plan.config.speculation.exact is not None
    free = plan.memory.in_memory and plan.alone and plan.machine.own_kernels and not declined
    return (FREE,) if free else ()


def pads_rows(plan: Plan) -> bool:
    """True if streamed passes are to be padded to the rows of exact decoding."""
    return plan.streams and plan.exact and not plan.machine.own_kernels


def max_nodes(plan: Plan) -> int:
    """Nodes that a tree may have."""
    fixed = plan.config.speculation.tree_budget is not None
    nodes = _EXPERT_NODES if plan.holding.experts is not None and not fixed else plan.context.n_outputs
    return min(nodes, MAX_PADDED_ROWS) if pads_rows(plan) else nodes
