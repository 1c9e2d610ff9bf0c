"""The most nodes of a tree, which decides for how many rows of a pass there is room for logits.

In memory every row of a large pass costs time, so that no tree beyond the usual size pays. While weights are
read from disk, rows are free as long as their arithmetic takes less time than reading. Where exact passes may
have any number of rows, larger trees are then allowed, if their logits take little of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import read_seconds
from edgespec.loading.plan import Plan, Planner
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.footprint import LARGE_NODES, USUAL_NODES

_LARGEST_NODES = 256  # where passes of LARGE_NODES were measured, and wait for the disk
_SHARE = 1 / 64  # of the budget, for the logits of nodes beyond the usual
_EXPERT_NODES = 8  # every node needs experts of its own, so that larger trees lose
_LOGIT_BYTES = 2 * 4  # in the graph and in the output buffer


def usual_nodes(planner: Planner) -> int:
    """Nodes that trees may have if no other number is asked for."""
    config, files, room = planner.config, planner.target, planner.budget
    header = files.headers[0]
    offload = config.memory.offload
    streams = offload == "stream" or (offload == "auto" and files.tensor_bytes > room)
    drafts = config.speculation.drafts and config.speculation.tree_budget is None
    if not (streams and drafts) or header.keeps_running_state or config.speculation.exact is False:
        return USUAL_NODES
    machine = planner.machine
    if not machine.own_kernels or machine.workers is not None or layer_weights(files).experts:
        return USUAL_NODES
    passes = planner.known_passes(streams=True)
    read_s = 0.0 if passes is None else read_seconds(max(files.tensor_bytes - room, 0), passes.read_rate)
    affordable = USUAL_NODES + int(room * _SHARE) // (_LOGIT_BYTES * header.n_vocab)
    return _allowed(affordable, passes.compute if passes is not None and read_s else None, read_s)


def most_nodes(plan: Plan, *, experts: bool) -> int:
    """Nodes that a tree may have under a plan.

    Args:
        experts: whether passes read the experts that their rows need.
    """
    fixed = plan.config.speculation.tree_budget is not None
    return _EXPERT_NODES if experts and not fixed else plan.context.n_outputs


def _allowed(affordable: int, compute: Curve | None, read_s: float) -> int:
    """The largest size that memory allows, and that passes were not measured to be too slow for.

    Args:
        affordable: nodes whose logits there is memory for.
        compute: seconds of arithmetic, by rows; None if that was not measured.
        read_s: seconds that a pass reads.
    """
    allowed = USUAL_NODES
    for size in _sizes(measured=compute is not None):
        if size > affordable or (compute is not None and compute.at(allowed) >= read_s):
            break
        allowed = size
    return allowed


def _sizes(*, measured: bool) -> Iterable[int]:
    return (LARGE_NODES, _LARGEST_NODES) if measured else (LARGE_NODES,)
