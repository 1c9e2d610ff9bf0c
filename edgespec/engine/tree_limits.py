"""How large trees may be: what is asked for, and what the target can verify in a pass."""

from __future__ import annotations

from dataclasses import replace

from edgespec.engine.target import Target
from edgespec.speculation.growth import TreeLimits


def limits_for(target: Target, limits: TreeLimits | None, tree_budget: int | None) -> TreeLimits:
    """Limits that no tree may exceed.

    Args:
        limits: those that are asked for; None for none.
        tree_budget: the size that is asked for; None to follow the measured cost.
    """
    most = limits or TreeLimits(budget=target.max_nodes)
    most = replace(
        most,
        budget=min(tree_budget or most.budget, target.max_nodes),
        leaves=min(most.leaves, target.max_leaves),
        ends=target.model.vocabulary.ends,
    )
    if target.rule is not None and target.model.weights.expert_use is None:
        # Passes are padded to these rows anyway, so filling them costs nothing.
        most = replace(most, rows=target.rule.multiple, free=min(target.rule.minimum, most.budget))
    if most.leaves == 1:
        most = replace(most, width=1, branching=1)
    return most
