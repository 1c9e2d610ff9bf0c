"""The most nodes of a tree, which decides for how many rows of a pass there is room for logits.

In memory every row of a large pass costs time, so that no tree beyond the usual size pays. While weights are
read from disk, rows are free as long as their arithmetic takes less time than reading; while weights are sent
to a card, as long as the card is faster than the link. Where passes may have any number of rows, trees then
become as large as is fastest by what passes, draft steps and trees are known to take and to yield: a node's
logits take memory from weights, its row takes arithmetic, and its chance to be accepted falls with every node
before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from edgespec.config import LOOKUP
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import USUAL_OVERHEAD, DraftingCosts, TargetPasses, predict
from edgespec.costs.yields import USUAL_AGREEMENT, expected_yields
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.pass_costs import expected_passes
from edgespec.planning.plan import Plan
from edgespec.planning.planner import Planner
from edgespec.profiles.store import ProfileKeys

_LARGEST_NODES = 256  # more were never measured
_STEP = 8  # nodes from one size that is tried to the next
_AS_FAST = 0.99  # of the fastest size: a smaller one that comes so close is taken, for its memory


def usual_nodes(planner: Planner, drafter: ModelFiles | None = None) -> int:
    """Nodes that trees may have if no other number is asked for."""
    if not _may_be_large(planner):
        return USUAL_NODES
    passes = expected_passes(planner.target, planner.threads, planner.store, planner.disks)
    try:
        usual = planner.plan(drafter)
        exactly = usual.streams and usual.exact and planner.machine.own_kernels
        sends = usual.sends and not usual.rereads
        if not (exactly or sends) or (usual.streams and not passes.read_rate):
            return USUAL_NODES
        largest = replace(planner, usual_nodes=_LARGEST_NODES).plan(drafter)
    except MemoryLimitError:
        return USUAL_NODES
    drafting = known_drafting(planner, drafter) or _usual_drafting(planner.target, drafter, passes)
    if drafting.yields is not None:
        drafting = replace(drafting, yields=drafting.yields.reaching(_LARGEST_NODES))
    sizes = range(USUAL_NODES, _LARGEST_NODES + 1, _STEP)
    speeds = [
        predict(holding, usual.over(passes), drafting, nodes).tokens_per_second
        for nodes, holding in zip(sizes, _holdings(usual, largest, sizes), strict=True)
    ]
    return next(nodes for nodes, speed in zip(sizes, speeds, strict=True) if speed >= _AS_FAST * max(speeds))


def _holdings(usual: Plan, largest: Plan, sizes: Sequence[int]) -> Iterable[PlannedWeights]:
    """The places of a target's weights for each size of tree, from those for the first and the last size.

    The logits of each node take as much from the weights in memory as those of any other.
    """
    holding = usual.holding
    node_bytes = (largest.holding.streamed_bytes - holding.streamed_bytes) / (sizes[-1] - sizes[0])
    for nodes in sizes:
        more = round(node_bytes * (nodes - sizes[0]))
        yield replace(
            holding,
            resident_bytes=holding.resident_bytes - more,
            streamed_bytes=holding.streamed_bytes + more,
        )


def known_drafting(
    planner: Planner, drafter: ModelFiles | None, *, least_passes: int = 1
) -> DraftingCosts | None:
    """Drafting as it was measured with this pair in `least_passes` or more; None if it was not."""
    target = planner.target.headers[0].fingerprint
    name = LOOKUP if drafter is None else drafter.headers[0].fingerprint
    keys = ProfileKeys.of(target, name, threads=planner.threads, mode="")
    steps, yields = planner.store.drafts(keys.drafts), planner.store.yields_at(keys, 0.0)
    if yields is None or yields.passes < least_passes:
        return None
    if drafter is None:
        return DraftingCosts(name, yields)
    return None if steps is None else DraftingCosts(name, yields, steps.step, steps.overhead)


def _usual_drafting(target: ModelFiles, drafter: ModelFiles | None, passes: TargetPasses) -> DraftingCosts:
    """Drafting of which nothing is known: a step is a pass of the target, by their sizes."""
    yields = expected_yields(USUAL_AGREEMENT)
    if drafter is None:
        return DraftingCosts(LOOKUP, yields, measured=False)
    step = passes.compute.scaled(drafter.tensor_bytes / target.tensor_bytes)
    return DraftingCosts("drafter", yields, step, USUAL_OVERHEAD, measured=False)


def _may_be_large(planner: Planner) -> bool:
    """True if passes may read weights from disk, or send them to a card, and may have any number of rows."""
    config, files, machine = planner.config, planner.target, planner.machine
    offload = config.memory.offload
    streams = offload == "stream" or (offload == "auto" and files.tensor_bytes > planner.budget)
    exactly = config.speculation.exact is not False and machine.own_kernels
    drafts = config.speculation.drafts and config.speculation.tree_budget is None
    if not drafts or not ((streams and exactly) or machine.cards is not None):
        return False
    if files.headers[0].keeps_running_state or layer_weights(files).experts:
        return False
    return machine.workers is None
